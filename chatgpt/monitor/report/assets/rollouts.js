/* The reader of recorded sequences: filters, a group's responses side by side, tokens coloured by a number.

   An ES module without dependencies, which also works inlined in <script type="module">. Styles are in rollouts.css,
   colours in page.css. Texts of a run are inserted as textContent, never as markup.

     mountRollouts(element, source)      fills `element`; returns {refresh(phases)}
     embeddedSource(rows)                a source of rows that are in the page
     fetchSource(url, phases)            a source on a server: GET url?phase=&prompt=&text=&min=&max=&offset=&limit=
                                         returns rows as JSON

   source: {phases: [number], load(filter) -> Promise of rows}, filter: {phase, prompt, text, min, max, offset, limit};
   null or '' does not filter. `prompt` and `text` must be contained in prompt and response, case-insensitive.
   rows: results of chatgpt.monitor.report.rollouts.page_row, ordered by phase and index. */

const PAGE = 24; // maximum sequences on a page, except for a larger group
const FIRST_TOKENS = 600; // tokens of a response that are shown first; a button shows the others
const LONG_PROMPT = 400; // characters
const SPECIAL = /^\s?(<\|[^|]*\|>|<\/?[a-z_]{1,12}>|\[[A-Z]{2,10}\])$/; // special tokens

const QUANTITIES = [
  { key: 'advantages', name: 'Advantage', scale: 'diverging', about: 'of the token: learning makes it likelier where it is above 0' },
  { key: 'log_ratio', name: 'Log-ratio to the initial model', scale: 'diverging', unit: 'nats', about: 'log π(token) − log π_initial(token): above 0 where the policy makes it likelier' },
  { key: 'values', name: 'Value', scale: 'sequential', about: 'of the critic before the token' },
  { key: 'entropy', name: 'Entropy', scale: 'sequential', unit: 'nats', about: 'of the distribution that the token was sampled from' },
  { key: 'rewards', name: 'Reward', scale: 'diverging', about: 'of the token: KL penalty, and at the end the score' },
];

export function embeddedSource(rows) {
  const phases = [...new Set(rows.map((row) => row.phase))].sort((a, b) => a - b);
  const contains = (text, part) => !part || text.toLowerCase().includes(part.toLowerCase());
  const isNumber = (x) => typeof x === 'number';
  return {
    phases,
    async load(filter) {
      const found = rows.filter(
        (row) =>
          (filter.phase == null || row.phase === filter.phase) &&
          contains(row.prompt, filter.prompt) &&
          contains(row.response, filter.text) &&
          (filter.min == null || (isNumber(row.score) && row.score >= filter.min)) &&
          (filter.max == null || (isNumber(row.score) && row.score <= filter.max)),
      );
      return found.slice(filter.offset, filter.offset + filter.limit);
    },
  };
}

export function fetchSource(url, phases) {
  return {
    phases,
    async load(filter) {
      const asked = new URL(url, document.baseURI);
      for (const [name, value] of Object.entries(filter)) {
        if (value !== null && value !== '') asked.searchParams.set(name, String(value));
      }
      const answer = await fetch(asked, { credentials: 'same-origin', headers: { Accept: 'application/json' } });
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      return answer.json();
    },
  };
}

export function mountRollouts(element, source) {
  const ids = `ro${Math.random().toString(36).slice(2, 8)}`;
  element.replaceChildren();
  element.classList.add('rollouts');

  // ---------------------------------------------------------------- filters
  const form = make('form', 'ro-filters');
  form.setAttribute('role', 'search');
  form.setAttribute('aria-label', 'Filter recorded sequences');
  const phase = make('select');
  const before = button('‹', 'Phase before');
  const after = button('›', 'Next phase');
  const prompt = input('search', 'any');
  const text = input('search', 'any');
  const min = input('number', 'any');
  const max = input('number', 'any');
  for (const bound of [min, max]) bound.step = 'any';
  const colour = make('select');
  for (const q of QUANTITIES) colour.append(option(q.key, q.name));
  colour.append(option('', 'Nothing'));
  const reset = button('Clear');
  reset.setAttribute('aria-label', 'Clear filters');
  const phaseField = field('Phase', phase);
  const phaseRow = make('span', 'ro-row');
  phaseRow.append(before, phase, after);
  phaseField.append(phaseRow);
  const scoreField = make('div', 'ro-field');
  scoreField.setAttribute('role', 'group');
  scoreField.setAttribute('aria-label', 'Score');
  const range = make('span', 'ro-row');
  min.setAttribute('aria-label', 'Lowest score');
  max.setAttribute('aria-label', 'Highest score');
  range.append(min, make('span', '', 'to'), max);
  scoreField.append(make('span', 'ro-label', 'Score'), range);
  form.append(phaseField, scoreField, field('Prompt contains', prompt), field('Response contains', text));
  form.append(field('Colour tokens by', colour), reset);

  const legend = make('div', 'ro-legend');
  const state = make('p', 'ro-state');
  state.setAttribute('role', 'status');
  const list = make('div', 'ro-groups');
  const pager = make('nav', 'ro-pager');
  pager.setAttribute('aria-label', 'Pages of sequences');
  const previous = button('Previous page');
  const next = button('Next page');
  const where = make('span', 'muted');
  pager.append(previous, where, next);
  const live = make('p', 'visually-hidden');
  live.setAttribute('aria-live', 'polite');
  const tip = make('div', 'ro-tip');
  tip.setAttribute('aria-hidden', 'true');
  tip.hidden = true;
  element.append(form, legend, state, list, pager, live, tip);

  let phases = [];
  let offsets = [0]; // start of each page up to this one
  let nextOffset = null;
  let asked = 0; // number of the latest request; responses to earlier ones are dropped
  let shown = []; // {row, body, spans, next: the first token not yet there} of each response on the page
  let places = new WeakMap(); // span -> {entry, at: its place in spans, from, to: its tokens}

  function setPhases(given, chosen = phase.value) {
    phases = [...given];
    phase.replaceChildren(option('', 'All phases'));
    for (const number of phases) phase.append(option(String(number), `Phase ${number}`));
    phase.value = phases.includes(Number(chosen)) ? chosen : '';
  }

  // ---------------------------------------------------------------- loading
  function filterNow(offset) {
    const number = (box) => (box.value.trim() === '' || Number.isNaN(box.valueAsNumber) ? null : box.valueAsNumber);
    return {
      phase: phase.value === '' ? null : Number(phase.value),
      prompt: prompt.value,
      text: text.value,
      min: number(min),
      max: number(max),
      offset,
      limit: PAGE + 1, // one more, to know if there is a next page
    };
  }

  function setSteps() {
    const at = phase.value === '' ? -1 : phases.indexOf(Number(phase.value));
    before.disabled = at <= 0;
    after.disabled = at < 0 || at === phases.length - 1;
  }

  async function load() {
    const turn = ++asked;
    setSteps();
    if (phases.length === 0) {
      draw([]);
      state.textContent = 'This run has recorded no sequences.';
      return;
    }
    state.textContent = 'Loading…';
    element.setAttribute('aria-busy', 'true');
    const offset = offsets.at(-1);
    try {
      let filter = filterNow(offset);
      let rows = await source.load(filter);
      while (turn === asked && rows.length === filter.limit && sameGroup(rows[0], rows.at(-1))) {
        filter = { ...filter, limit: 2 * filter.limit }; // a group larger than a page
        rows = await source.load(filter);
      }
      if (turn !== asked) return;
      nextOffset = null;
      if (rows.length === filter.limit) {
        const last = rows.at(-1);
        rows = rows.slice(0, -1);
        while (rows.length && sameGroup(rows.at(-1), last)) rows.pop(); // a group is not split: it begins the next page
        nextOffset = offset + rows.length;
      }
      draw(rows);
      const end = offset + rows.length;
      state.textContent = rows.length === 0 ? 'No sequence matches.' : `Sequences ${offset + 1} to ${end}`;
      if (rows.length && nextOffset === null) state.textContent += ` of ${end}`;
    } catch (error) {
      if (turn !== asked) return;
      draw([]);
      state.textContent = `Cannot be loaded: ${error.message} `;
      const again = button('Try again');
      again.addEventListener('click', load);
      state.append(again);
    } finally {
      if (turn === asked) element.removeAttribute('aria-busy');
    }
  }

  function restart() {
    offsets = [0];
    load();
  }

  // ---------------------------------------------------------------- drawing
  function draw(rows) {
    hideTip();
    shown = [];
    places = new WeakMap();
    list.replaceChildren();
    let group = null;
    let of = null;
    for (const row of rows) {
      if (!of || !sameGroup(of, row)) {
        of = row;
        group = groupOf(row, rows.filter((other) => sameGroup(other, row)));
        list.append(group);
      }
      group.lastChild.append(responseOf(row));
    }
    pager.hidden = offsets.length === 1 && nextOffset === null;
    previous.disabled = offsets.length === 1;
    next.disabled = nextOffset === null;
    where.textContent = `Page ${offsets.length}`;
    paint();
  }

  function groupOf(row, members) {
    const section = make('section', members.length > 1 ? 'ro-group ro-many' : 'ro-group');
    const facts = [`phase ${row.phase}`];
    if (members.length > 1) facts.push(`group ${row.group}`);
    section.setAttribute('aria-label', `Sequences of ${facts.join(', ')}`);
    const head = make('header', 'ro-head');
    const scores = members.map((m) => m.score).filter((s) => typeof s === 'number');
    if (members.length > 1 && scores.length) {
      const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
      facts.push(`${members.length} responses`, `scores ${show(Math.min(...scores))} to ${show(Math.max(...scores))}, mean ${show(mean)}`);
    }
    head.append(make('span', 'muted small', facts.join(' · ')));
    const same = button('This prompt in all phases');
    same.className = 'ro-link';
    same.addEventListener('click', () => {
      // A field has one line, so it gets the longest line of the prompt.
      prompt.value = (row.last_turn || row.prompt).split(/\r?\n/).reduce((a, b) => (b.length > a.length ? b : a), '');
      phase.value = '';
      restart();
    });
    if (phases.length > 1 && row.prompt) head.append(same);
    const asked = make('div', 'ro-prompt');
    asked.dir = 'auto';
    const pieces = row.prompt_tokens && row.prompt_tokens.length ? row.prompt_tokens : [row.prompt];
    const whole = make('span');
    for (const piece of pieces) fill(whole.appendChild(make('span', SPECIAL.test(piece) ? 'ro-special' : '')), piece);
    if (row.last_turn || row.prompt.length > LONG_PROMPT) {
      const more = make('details');
      const summary = make('summary');
      const letters = [...(row.last_turn || row.prompt)];
      summary.textContent = letters.length > LONG_PROMPT ? `${letters.slice(0, LONG_PROMPT / 2).join('')}…` : letters.join('');
      more.append(summary, whole);
      asked.append(more);
    } else {
      asked.append(whole);
    }
    section.append(head, asked, make('div', 'ro-responses'));
    return section;
  }

  function responseOf(row) {
    const card = make('article', 'ro-response');
    card.setAttribute('aria-label', `Response ${row.index}, score ${show(row.score)}`);
    const facts = make('div', 'ro-facts');
    const score = make('strong', '', `score ${show(row.score)}`);
    if (row.weighted_scores && row.weighted_scores.length > 1) {
      score.title = row.weighted_scores.map(([weight, own]) => `${show(weight)} × ${show(own)}`).join(' + ');
    }
    const end = row.episode ? row.episode.end : row.finish_reason;
    const others = [`${row.tokens.length} tokens`, ENDS[end] ?? end];
    if (row.kl != null) others.unshift(`KL ${show(row.kl)}`);
    if (row.episode) {
      const count = row.episode.turns.length;
      others.splice(-2, 0, count === 1 ? '1 turn' : `${count} turns`);
      if (row.episode.success != null) others.push(row.episode.success ? 'success' : 'no success');
    }
    facts.append(score, make('span', 'muted', others.join(' · ')));
    if (row.episode && row.episode.message) facts.append(make('span', 'ro-failure', row.episode.message));
    const body = make('div', 'ro-tokens');
    body.dir = 'auto';
    body.setAttribute('role', 'group');
    body.setAttribute('aria-label', `Tokens of response ${row.index}. Arrow keys go from token to token.`);
    const segments = row.episode ? segmentsOf(row) : [{ start: 0, stop: row.tokens.length }];
    const entry = { row, body, spans: [], next: 0, segments };
    shown.push(entry);
    addTokens(entry, FIRST_TOKENS);
    if (entry.spans.length) entry.spans[0].tabIndex = 0;
    card.append(facts, body);
    if (entry.next < row.tokens.length) {
      const more = button(`Show all ${row.tokens.length} tokens`);
      more.addEventListener('click', () => {
        const first = entry.spans.length;
        addTokens(entry, row.tokens.length);
        more.remove();
        paint();
        focusToken(entry, first);
      });
      card.append(more);
    }
    return card;
  }

  /* Returns the parent of a part's tokens: the body, or a block of a turn or an observation. */
  function placeOf(entry, segment) {
    if (!entry.row.episode) return entry.body;
    if (segment.place) return segment.place;
    const block = make('div', segment.number ? 'ro-turn' : 'ro-seen');
    const label = segment.number ? `turn ${segment.number}` : 'environment';
    const head = make('div', 'ro-part');
    head.append(make('span', '', label));
    if (segment.number) head.append(make('span', 'ro-reward', rewardsOf(segment)));
    block.setAttribute('role', 'group');
    block.setAttribute('aria-label', segment.number ? `Turn ${segment.number}, ${rewardsOf(segment)}` : 'The environment');
    segment.place = make('div');
    block.append(head, segment.place);
    entry.body.append(block);
    return segment.place;
  }

  /* The tokens of one character share a span, since only the last has text. */
  function addTokens(entry, stop) {
    const { row, spans, segments } = entry;
    const end = Math.min(row.tokens.length, stop);
    for (let from = entry.next; from < end; from = entry.next) {
      const segment = segments.find((part) => from < part.stop);
      const last = segment.stop - 1;
      let to = from;
      while (row.tokens[to] === '' && to < last) to++;
      const span = make('span', 'ro-token');
      if (!row.mask[to]) span.classList.add('ro-masked');
      if (SPECIAL.test(row.tokens[to])) span.classList.add('ro-special');
      fill(span, row.tokens[to]);
      places.set(span, { entry, at: spans.length, from, to });
      spans.push(span);
      placeOf(entry, segment).append(span);
      entry.next = to + 1;
    }
  }

  /* Returns the numbers of a span's tokens, null if there is none. */
  function numbersAt({ entry, from, to }, key) {
    const values = entry.row[key];
    return values ? values.slice(from, to + 1) : [null];
  }

  function meanAt(place, key) {
    const numbers = numbersAt(place, key).filter((x) => typeof x === 'number');
    return numbers.length && place.entry.row.mask[place.to] ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
  }

  // ---------------------------------------------------------------- colour
  function paint() {
    const quantity = QUANTITIES.find((q) => q.key === colour.value);
    const spans = shown.flatMap((entry) => entry.spans);
    const values = spans.map((span) => (quantity ? meanAt(places.get(span), quantity.key) : null));
    const numbers = values.filter((x) => x !== null);
    const scale = numbers.length ? scaleOf(quantity.scale, numbers) : null;
    spans.forEach((span, i) => {
      const tint = scale && values[i] !== null ? scale.tint(values[i]) : null;
      if (tint) {
        span.dataset.tint = tint.kind;
        span.style.setProperty('--strength', `${(100 * tint.strength).toFixed(1)}%`);
      } else {
        delete span.dataset.tint;
        span.style.removeProperty('--strength');
      }
    });
    drawLegend(quantity, scale);
  }

  function drawLegend(quantity, scale) {
    legend.replaceChildren();
    if (shown.length === 0) return;
    if (quantity && scale) {
      const unit = quantity.unit ? ` ${quantity.unit}` : '';
      const bar = make('span', `ro-scale ro-${quantity.scale}`);
      bar.setAttribute('aria-hidden', 'true');
      const row = make('span', 'ro-row ro-key');
      row.append(make('strong', '', quantity.name), make('span', '', scale.low + unit), bar, make('span', '', scale.high + unit));
      legend.append(row, make('span', 'muted', quantity.about));
    } else if (quantity) {
      legend.append(make('span', 'muted', `${quantity.name}: not recorded for these sequences`));
    }
    if (shown.some(({ row }) => row.episode)) {
      const row = make('span', 'ro-row');
      row.append(make('span', 'ro-seen ro-key-seen', 'environment'), make('span', 'muted', 'observations: not trained on'));
      legend.append(row);
    }
    if (shown.some(({ row }) => !row.episode && row.mask.includes(false))) {
      const row = make('span', 'ro-row');
      row.append(make('span', 'ro-token ro-masked', 'token'), make('span', 'muted', 'does not count: not trained on'));
      legend.append(row);
    }
    legend.append(make('span', 'muted', 'A token under the pointer or selected with Tab and the arrow keys shows its numbers.'));
  }

  // ---------------------------------------------------------------- a token's numbers
  function linesOf(place) {
    const lines = [];
    if (place.entry.row.episode && !place.entry.row.mask[place.to]) return lines; // an observation
    for (const q of QUANTITIES) {
      const numbers = numbersAt(place, q.key);
      if (!numbers.some((x) => typeof x === 'number')) continue;
      const value = numbers.map((x) => show(x, q.scale === 'diverging')).join(' / ');
      lines.push({ key: q.key, name: q.name, value: value + (q.unit ? ` ${q.unit}` : '') });
    }
    return lines;
  }

  function nameOf({ entry, to }) {
    return entry.row.tokens[to].replaceAll('\n', '↵').replaceAll('\t', '⇥');
  }

  function whereOf({ entry, from, to }) {
    const of = `of ${entry.row.tokens.length}`;
    return from === to ? `token ${to + 1} ${of}` : `tokens ${from + 1} to ${to + 1} ${of}`;
  }

  function showTip(span) {
    const place = places.get(span);
    const { row } = place.entry;
    tip.replaceChildren();
    const ids = row.token_ids ? `, id ${row.token_ids.slice(place.from, place.to + 1).join(' ')}` : '';
    tip.append(make('bdi', 'ro-tip-name', nameOf(place)), make('span', 'muted', whereOf(place) + ids));
    if (!row.mask[place.to]) tip.append(make('span', '', row.episode ? 'from the environment' : 'does not count'));
    const table = make('dl');
    for (const line of linesOf(place)) {
      const now = line.key === colour.value ? 'ro-now' : '';
      table.append(make('dt', now, line.name), make('dd', now, line.value));
    }
    tip.append(table);
    tip.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const own = tip.getBoundingClientRect();
    const left = Math.min(box.left, document.documentElement.clientWidth - own.width - 8);
    const below = box.bottom + 6 + own.height < window.innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  function tokenAt(target) {
    const span = target instanceof Element ? target.closest('.ro-token') : null;
    return span && places.has(span) ? span : null;
  }

  function focusToken(entry, at) {
    const span = entry.spans[at];
    if (!span) return;
    for (const other of entry.spans) if (other !== span && other.tabIndex === 0) other.removeAttribute('tabindex');
    span.tabIndex = 0;
    span.focus({ preventScroll: false });
  }

  list.addEventListener('pointerover', (event) => {
    const span = tokenAt(event.target);
    if (span) showTip(span);
    else if (!tokenAt(document.activeElement)) hideTip();
  });
  const tipOfFocus = () => {
    const span = tokenAt(document.activeElement);
    if (span) showTip(span);
    else hideTip();
  };
  list.addEventListener('pointerleave', tipOfFocus);
  list.addEventListener('click', (event) => {
    const span = tokenAt(event.target);
    if (!span || !document.getSelection().isCollapsed) return; // the user selects text
    const { entry, at } = places.get(span);
    focusToken(entry, at);
  });
  list.addEventListener('focusin', (event) => {
    const span = tokenAt(event.target);
    if (!span) return;
    showTip(span);
    const place = places.get(span);
    const told = [`${nameOf(place)}, ${whereOf(place)}`, ...linesOf(place).map((line) => `${line.name} ${line.value}`)];
    if (!place.entry.row.mask[place.to]) told.push(place.entry.row.episode ? 'from the environment' : 'does not count');
    live.textContent = told.join('; ');
  });
  list.addEventListener('focusout', hideTip);
  list.addEventListener('keydown', (event) => {
    const span = tokenAt(event.target);
    if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
    const { entry, at } = places.get(span);
    const forward = getComputedStyle(entry.body).direction === 'rtl' ? 'ArrowLeft' : 'ArrowRight';
    const backward = forward === 'ArrowLeft' ? 'ArrowRight' : 'ArrowLeft';
    const last = entry.spans.length - 1;
    let to = null;
    if (event.key === forward) to = Math.min(at + 1, last);
    else if (event.key === backward) to = Math.max(at - 1, 0);
    else if (event.key === 'Home') to = 0;
    else if (event.key === 'End') to = last;
    else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') to = lineFrom(entry.spans, at, event.key === 'ArrowDown');
    else if (event.key === 'Escape') hideTip();
    if (to === null) return;
    event.preventDefault();
    focusToken(entry, to);
  });
  window.addEventListener('scroll', tipOfFocus, { passive: true });

  // ---------------------------------------------------------------- events of the filters
  let waiting = 0;
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    restart();
  });
  form.addEventListener('input', (event) => {
    if (event.target === colour) return;
    clearTimeout(waiting);
    waiting = setTimeout(restart, event.target === phase ? 0 : 250);
  });
  colour.addEventListener('change', paint);
  const step = (by) => {
    phase.value = String(phases[phases.indexOf(Number(phase.value)) + by]);
    restart();
  };
  before.addEventListener('click', () => step(-1));
  after.addEventListener('click', () => step(1));
  reset.addEventListener('click', () => {
    for (const box of [prompt, text, min, max]) box.value = '';
    restart();
  });
  previous.addEventListener('click', () => {
    offsets.pop();
    load().then(toTop);
  });
  next.addEventListener('click', () => {
    offsets.push(nextOffset);
    load().then(toTop);
  });
  const toTop = () => element.scrollIntoView({ block: 'start' });

  setPhases(source.phases, String(source.phases.at(-1) ?? ''));
  load();
  return {
    /* Adds new phases to the filter; the shown page stays. */
    refresh(given) {
      setPhases(given);
      setSteps();
    },
  };

  // ---------------------------------------------------------------- small parts
  function field(label, control) {
    const box = make('div', 'ro-field');
    control.id = `${ids}-${label.replace(/\W+/g, '-')}`;
    const name = make('label', '', label);
    name.htmlFor = control.id;
    box.append(name, control);
    return box;
  }
}

/* Returns the scale of a colour: labels of its ends, and the strength for a number. The outermost 2 % have full strength,
   so that one outlier does not make all others pale. */
function scaleOf(kind, numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const quantile = (list, share) => list[Math.min(list.length - 1, Math.floor(share * list.length))];
  if (kind === 'diverging') {
    const sizes = numbers.map(Math.abs).sort((a, b) => a - b);
    const largest = sizes.at(-1);
    const limit = quantile(sizes, 0.98) || largest;
    const word = (sign, mark) => (largest > limit ? `${mark} ` : '') + show(sign * limit, true);
    return {
      low: word(-1, '≤'),
      high: word(1, '≥'),
      tint: (x) => (limit === 0 ? null : { kind: x < 0 ? 'below' : 'above', strength: Math.min(1, Math.abs(x) / limit) }),
    };
  }
  const low = quantile(sorted, 0.02);
  const high = quantile(sorted, 0.98);
  return {
    low: (sorted[0] < low ? '≤ ' : '') + show(low),
    high: (sorted.at(-1) > high ? '≥ ' : '') + show(high),
    tint: (x) => ({ kind: 'amount', strength: high > low ? Math.min(1, Math.max(0, (x - low) / (high - low))) : 0 }),
  };
}

const ENDS = {
  eos: 'ended',
  stop: 'stopped',
  length: 'cut at the limit',
  terminated: 'the task ended',
  truncated: 'cut off by the environment',
  turns: 'out of turns',
  tokens: 'out of tokens',
  error: 'the environment failed',
  timeout: 'the environment took too long',
  invalid: 'the environment returned an invalid value',
};

/* Returns the parts of an episode: turns of the policy, and the observations between them. */
function segmentsOf(row) {
  const found = [];
  let at = 0;
  row.episode.turns.forEach((turn, i) => {
    if (turn.start > at) found.push({ start: at, stop: turn.start });
    found.push({ ...turn, number: i + 1 });
    at = turn.stop;
  });
  if (at < row.tokens.length) found.push({ start: at, stop: row.tokens.length });
  return found;
}

function rewardsOf(turn) {
  const entries = Object.entries(turn.rewards);
  if (entries.length === 0) return 'no reward';
  return entries.map(([name, value]) => `${name} ${show(value, true)}`).join(', ');
}

function sameGroup(a, b) {
  return a.phase === b.phase && a.group === b.group;
}

/* Returns the index of the nearest token on the next or previous line. */
function lineFrom(spans, at, down) {
  const boxes = (span) => span.getClientRects()[0] ?? span.getBoundingClientRect();
  const here = boxes(spans[at]);
  let best = null;
  let line = null;
  for (let i = at + (down ? 1 : -1); i >= 0 && i < spans.length; i += down ? 1 : -1) {
    const box = boxes(spans[i]);
    if (Math.abs(box.top - here.top) < here.height / 2) continue;
    if (line !== null && Math.abs(box.top - line) > here.height / 2) break;
    line = box.top;
    const gap = Math.abs(box.left + box.width / 2 - here.left - here.width / 2);
    if (best === null || gap < best.gap) best = { i, gap };
  }
  return best === null ? at : best.i;
}

/* Shows line breaks with a sign before them. */
function fill(span, piece) {
  const lines = piece.split('\n');
  lines.forEach((line, i) => {
    if (i > 0) {
      const sign = make('span', 'ro-break');
      sign.setAttribute('aria-hidden', 'true');
      span.append(sign, '\n');
    }
    if (line) span.append(line);
  });
}

export function show(x, signed = false) {
  if (typeof x !== 'number' || !Number.isFinite(x)) return '–';
  let text;
  if (x === 0) text = '0';
  else if (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5) text = x.toExponential(1);
  else text = String(Number(x.toPrecision(3)));
  if (signed && x > 0) text = `+${text}`;
  return text.replace('-', '−');
}

function make(tag, name = '', text = null) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== null) made.textContent = text;
  return made;
}

function button(text, label = null) {
  const made = make('button', '', text);
  made.type = 'button';
  if (label) made.setAttribute('aria-label', label);
  return made;
}

function input(type, placeholder) {
  const made = make('input');
  made.type = type;
  made.placeholder = placeholder;
  return made;
}

function option(value, text) {
  const made = make('option', '', text);
  made.value = value;
  return made;
}
