// Draws the charts of a report: values under the pointer in all charts at once, zoom, smoothing, keyboard, print.
// The numbers are in the script element #curves: {phases: [...], charts: [{key, stacked, lines: [...]}]}.
'use strict';

(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId('curves').textContent);
  const phases = data.phases.map((p) => (Array.isArray(p) ? p : Array.from({length: p.count}, (_, i) => p.first + i)));
  const ends = phases.filter((p) => p.length).map((p) => [p[0], p[p.length - 1]]);
  const first = Math.min(...ends.map((e) => e[0]));
  const last = Math.max(...ends.map((e) => e[1]));
  const margin = first === last ? 1 : 0;
  const whole = [first - margin, last + margin];

  const mounted = new Map();  // figure → {plot, update(), repaint()}
  let shown = whole;          // phases on every x axis
  let smoothing = 0;
  let colors = {};
  let due = 0;                // the frame that will draw a new smoothing

  const color = (name) => (colors[name] ??= getComputedStyle(root).getPropertyValue(`--${name}`).trim());

  // ------------------------------------------------------------------ numbers

  /** Formats a number with three digits, as in the tables. */
  function number(value) {
    if (value === null || value === undefined) return 'none';
    const size = Math.abs(value);
    if (size === 0) return '0';
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0*e\+?/, 'e');
    if (size >= 1000) return Math.round(value).toLocaleString('en').replaceAll(',', '\u202f');
    return String(size < 100 ? Number(value.toPrecision(3)) : Math.round(value));
  }

  function tick(value, step) {
    if (value === 0) return '0';
    if (Math.abs(value) >= 10000) return new Intl.NumberFormat('en', {notation: 'compact'}).format(value);
    let decimals = 0;
    while (decimals < 9 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6 * step * 10 ** decimals) decimals++;
    return decimals > 4 && Math.abs(value) < 0.01 ? String(Number(value.toPrecision(4)).toExponential()).replace('e+', 'e') : value.toFixed(decimals);
  }

  /** Bias-corrected exponential moving average; weights depend on the distance in phases. Gaps stay gaps. */
  function smooth(xs, ys, weight) {
    if (!weight) return ys.slice();
    const measured = ys.reduce((n, y) => n + (typeof y === 'number'), 0);
    const typical = measured > 1 ? (xs[xs.length - 1] - xs[0]) / (measured - 1) : 1;
    let sum = 0, total = 0, at = xs[0];
    return ys.map((y, i) => {
      if (typeof y !== 'number') return y;
      const fade = weight ** ((xs[i] - at) / typical || (total ? 1 : 0));
      at = xs[i];
      sum = sum * fade + y * (1 - weight);
      total = total * fade + (1 - weight);
      return sum / total;
    });
  }

  // ------------------------------------------------------------------ one chart

  function mount(figure) {
    if (mounted.has(figure)) return mounted.get(figure);
    const chart = data.charts.find((c) => c.key === figure.dataset.chart);
    const place = figure.querySelector('.plot');
    const title = figure.querySelector('h3').textContent;
    const lines = chart.lines;
    // All lines get the union of their phases. A missing value is undefined, which uPlot bridges; null (a value that was
    // not finite) leaves a gap.
    const joined = uPlot.join(lines.map((line) => [phases[line.x], line.y]));
    const xs = joined[0], raw = joined.slice(1);
    const isSmoothed = (line) => line.role === 'line' || line.role === 'dashed';
    const hidden = new Set();

    /** [xs, the drawn values of each line, then the measured values behind smoothed ones] */
    function columns() {
      const drawn = lines.map((line, i) => (isSmoothed(line) ? smooth(xs, raw[i], smoothing) : raw[i]));
      if (!chart.stacked) return [xs, ...drawn, ...(lines.length > 8 ? [] : raw)];
      const sums = xs.map(() => 0);
      return [xs, ...drawn.map((ys, i) => ys.map((y, j) => (hidden.has(i) ? null : typeof y === 'number' ? (sums[j] += y) : y)))];
    }

    const stroke = (line) => () => color(`series-${line.color}`);
    const faint = (line, alpha) => () => color(`series-${line.color}`) + alpha;
    const lonely = xs.length === 1;
    const drawnSeries = lines.map((line) => {
      const edge = line.role === 'low' || line.role === 'high';
      return {
        label: line.label,
        stroke: edge ? faint(line, '66') : stroke(line),
        width: edge ? 1 : 2,
        dash: {plan: [6, 4], dashed: [8, 3]}[line.role],
        fill: chart.stacked ? faint(line, 'd0') : undefined,
        points: edge || chart.stacked || line.role === 'plan' ? {show: lonely, size: 7} : {size: 5},
      };
    });
    const behind = chart.stacked || lines.length > 8 ? [] : lines.map((line) => ({
      label: `${line.label}, measured`, show: false, stroke: faint(line, '80'), width: 1, points: {show: false},
    }));
    const low = lines.findIndex((line) => line.role === 'low');
    const high = lines.findIndex((line) => line.role === 'high');

    const plot = new uPlot({
      width: Math.max(place.clientWidth, 200),
      height: 200,
      legend: {show: false},
      padding: [8, 18, 0, 0],
      scales: {
        x: {time: false, range: () => shown},
        y: {range: chart.stacked ? (u, min, max) => [0, (max || 1) * 1.04] : roomy},
      },
      axes: [axis({incrs: [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7].map((e) => n * 10 ** e)).sort((a, b) => a - b), space: 60, size: 26}),
        axis({size: 54, space: 34})],
      series: [{label: 'phase'}, ...drawnSeries, ...behind],
      // A stack is drawn from its top: each area ends at the one below it.
      bands: chart.stacked
        ? lines.slice(1).map((_, i) => ({series: [i + 2, i + 1]}))
        : low >= 0 && high >= 0 ? [{series: [high + 1, low + 1], fill: faint(lines[low], '1c')}] : [],
      cursor: {
        y: false,
        drag: {x: true, y: false, setScale: false, dist: 4},
        points: {size: 8},
        sync: {key: 'phases', scales: ['x', null], filters: {pub: (type) => type === 'mousemove' || type === 'mouseleave', sub: () => true}},
        bind: {dblclick: () => () => zoom(whole)},
      },
      hooks: {
        setCursor: [() => legend()],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const [from, to] = [u.select.left, u.select.left + u.select.width].map((left) => u.posToVal(left, 'x'));
          u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          zoom([from, to]);
        }],
      },
    }, columns(), place);
    plot.root.setAttribute('aria-hidden', 'true');

    // -------------------------------------------------------------- values of the phase under the cursor

    const at = document.createElement('span');
    at.className = 'at';
    const chips = lines.map((line, i) => {
      const chip = document.createElement('button');
      const swatch = document.createElement('span');
      const value = document.createElement('b');
      chip.type = 'button';
      chip.className = 'chip';
      chip.setAttribute('aria-pressed', 'true');
      swatch.className = `swatch s${line.color} ${line.role}`;
      chip.append(swatch, ` ${line.label} `, value);
      chip.addEventListener('click', () => {
        hidden.has(i) ? hidden.delete(i) : hidden.add(i);
        chip.setAttribute('aria-pressed', String(!hidden.has(i)));
        update();
      });
      return {chip, value};
    });
    const order = (i) => (lines[i].role === 'low' || lines[i].role === 'high' ? 1 : 0);
    const inOrder = chips.map((c, i) => i).sort((a, b) => order(a) - order(b) || a - b);
    figure.querySelector('.legend').replaceChildren(at, ...inOrder.map((i) => chips[i].chip));

    /** Index in xs of the cursor, else of the last visible phase. */
    function current() {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined && plot.cursor.left >= 0) return plot.cursor.idx;
      let i = xs.length - 1;
      while (i > 0 && xs[i] > shown[1]) i--;
      return i;
    }

    /** Value of line i at that index, or the last one before: evaluations are not made in every phase. */
    function valueAt(i, place) {
      while (place > 0 && raw[i][place] === undefined) place--;
      return {value: raw[i][place], phase: xs[place]};
    }

    function words(i, place) {
      const {value, phase} = valueAt(i, place);
      const shownValue = value === undefined ? 'none' : number(value);
      const text = smoothing && isSmoothed(lines[i]) && !chart.stacked && typeof value === 'number'
        ? `${shownValue} (smoothed ${number(plot.data[i + 1][xs.indexOf(phase)])})` : shownValue;
      return phase === xs[place] || value === undefined || lines[i].role === 'plan' ? text : `${text} (phase ${phase})`;
    }

    function legend() {
      const place = current();
      at.textContent = `phase ${xs[place]}`;
      chips.forEach(({value}, i) => { value.textContent = words(i, place); });
    }

    // -------------------------------------------------------------- keyboard and touch

    place.tabIndex = 0;
    place.setAttribute('role', 'application');
    place.setAttribute('aria-roledescription', 'chart');
    place.setAttribute('aria-label', `${title}, ${lines.map((l) => l.label).join(', ')}, over phases ${xs[0]} to ${xs[xs.length - 1]}. Arrow keys read the values, plus and minus zoom.`);

    function moveTo(i) {
      plot.setCursor({left: plot.valToPos(xs[i], 'x'), top: plot.over.clientHeight / 2}, true, true);
      byId('status').textContent = `Phase ${xs[i]}: ${inOrder.map((n) => `${lines[n].label} ${words(n, i)}`).join(', ')}`;
    }

    place.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const inSight = xs.map((x, i) => i).filter((i) => xs[i] >= shown[0] && xs[i] <= shown[1]);
      if (!inSight.length) return;
      const [from, to] = [inSight[0], inSight[inSight.length - 1]];
      const by = event.shiftKey ? 10 : 1;
      const started = plot.cursor.left >= 0;
      const moves = {
        ArrowLeft: () => moveTo(Math.max(from, started ? current() - by : to)),
        ArrowRight: () => moveTo(Math.min(to, started ? current() + by : from)),
        Home: () => moveTo(from),
        End: () => moveTo(to),
        '+': () => zoomBy(0.5, xs[current()]),
        '=': () => zoomBy(0.5, xs[current()]),
        '-': () => zoomBy(2, xs[current()]),
        0: () => zoom(whole),
        Escape: () => plot.setCursor({left: -10, top: -10}, true, true),
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moves[event.key]();
    });
    plot.over.addEventListener('pointermove', (event) => {
      if (event.pointerType !== 'touch') return;
      const box = plot.over.getBoundingClientRect();
      plot.setCursor({left: Math.max(0, Math.min(event.clientX - box.left, box.width)), top: event.clientY - box.top}, true, true);
    });

    // -------------------------------------------------------------- redrawing

    function update() {
      plot.batch(() => {
        lines.forEach((line, i) => {
          plot.setSeries(i + 1, {show: !hidden.has(i)}, false);
          if (behind.length) plot.setSeries(lines.length + i + 1, {show: smoothing > 0 && isSmoothed(line) && !hidden.has(i)}, false);
        });
        plot.setData(columns(), false);
        plot.setScale('x', {min: shown[0], max: shown[1]});
      });
      legend();
    }

    new ResizeObserver(() => {
      if (!place.clientWidth) return;  // its section is closed
      const width = Math.max(place.clientWidth, 200);
      if (width !== plot.width && !root.classList.contains('paper')) plot.setSize({width, height: 200});
    }).observe(place);

    const one = {plot, update, repaint: () => plot.redraw(true, true)};
    mounted.set(figure, one);
    update();
    return one;
  }

  /** Range of the y axis, with padding; a constant line is in the middle, one at 0 at the bottom. */
  function roomy(u, min, max) {
    if (min === null || min === undefined) return [0, 1];
    if (min === max) return min === 0 ? [0, 1] : [min - Math.abs(min) / 2, min + Math.abs(min) / 2];
    return uPlot.rangeNum(min, max, 0.1, true);
  }

  function axis(options) {
    return {
      stroke: () => color('muted'),
      font: '12px system-ui, sans-serif',
      grid: {stroke: () => color('line'), width: 1},
      ticks: {show: false},
      gap: 6,
      values: (u, splits, i, space, step) => splits.map((v) => (v === null ? '' : tick(v, step))),
      ...options,
    };
  }

  // ------------------------------------------------------------------ all charts

  function zoom([from, to]) {
    const least = Math.min(2, whole[1] - whole[0]);
    if (to - from < least) { const middle = (from + to) / 2; [from, to] = [middle - least / 2, middle + least / 2]; }
    shown = [Math.max(whole[0], from), Math.min(whole[1], to)];
    const all = shown[0] <= whole[0] && shown[1] >= whole[1];
    byId('zoom-out').disabled = byId('zoom-all').disabled = all;
    byId('zoom-range').textContent = all ? '' : `phases ${Math.ceil(shown[0])} to ${Math.floor(shown[1])}`;
    mounted.forEach((chart) => chart.update());
  }

  function zoomBy(factor, middle = (shown[0] + shown[1]) / 2) {
    const half = (shown[1] - shown[0]) * factor / 2;
    zoom([middle - half, middle + half]);
  }

  function repaintAll() {
    colors = {};
    mounted.forEach((chart) => chart.repaint());
  }

  const figures = [...document.querySelectorAll('.chart[data-chart]')];
  if (figures.length) {
    document.querySelectorAll('.curves > .fold > details').forEach((part) => {
      const draw = () => part.open && part.querySelectorAll('.chart[data-chart]').forEach(mount);
      part.addEventListener('toggle', draw);
      draw();
    });
    byId('smoothing').addEventListener('input', (event) => {
      byId('smoothing-value').textContent = Number(event.target.value) ? Number(event.target.value).toFixed(2) : '0';
      if (!due) due = requestAnimationFrame(() => {  // a slider sends more events than charts can be drawn
        due = 0;
        smoothing = Number(event.target.value);
        mounted.forEach((chart) => chart.update());
      });
    });
    byId('zoom-in').addEventListener('click', () => zoomBy(0.5));
    byId('zoom-out').addEventListener('click', () => zoomBy(2));
    byId('zoom-all').addEventListener('click', () => zoom(whole));
  }

  /** Opens the section that contains the target of a link, and its parents. */
  function reveal(hash) {
    const target = hash ? byId(decodeURIComponent(hash.slice(1))) : null;
    target?.querySelector(':scope > details')?.setAttribute('open', '');
    for (let part = target?.closest('details'); part; part = part.parentElement.closest('details')) part.open = true;
    return target;
  }
  document.addEventListener('click', (event) => reveal(event.target.closest('a[href^="#"]')?.hash));
  reveal(location.hash)?.scrollIntoView();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaintAll);

  // ------------------------------------------------------------------ print: every chart in light colours, all sections open

  let folded = [];
  addEventListener('beforeprint', () => {
    folded = [...document.querySelectorAll('details:not([open])')];
    folded.forEach((part) => { part.open = true; });
    root.classList.add('paper');
    figures.forEach(mount);
    repaintAll();
  });
  addEventListener('afterprint', () => {
    folded.forEach((part) => { part.open = false; });
    root.classList.remove('paper');
    repaintAll();
  });
})();
