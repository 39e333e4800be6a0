// The page on which a person compares responses. Texts are inserted as textContent. A choice is shown as saved only
// after the server has confirmed that it is on disk.

const KEYS = {
  ArrowLeft: 'left', 1: 'left', ArrowRight: 'right', 2: 'right', t: 'tie', b: 'both_bad', s: 'skip', u: 'undo',
};
const CHOICES = { left: '1 is better', right: '2 is better', tie: 'a tie', both_bad: 'both bad', skip: 'skipped' };
const LOOK_AGAIN_MS = 10000;

const element = (id) => document.getElementById(id);
let pair = null;
let busy = false;
let timer;
let waits = false; // others are judging the last pairs

function say(text, isError = false) {
  element('status').textContent = text;
  element('status').classList.toggle('error', isError);
}

// Sends one request at a time; shows `done` after it has succeeded.
async function act(action, body, done) {
  if (busy) return;
  setBusy(true);
  clearTimeout(timer);
  try {
    const response = await fetch(`/api/${action}`, {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body),
    });
    const isJson = response.headers.get('Content-Type') === 'application/json';
    const state = isJson ? await response.json() : { error: (await response.text()).trim() };
    if ('person' in state) show(state);
    if (state.error) say(`Not done: ${state.error}.`, true);
    else if (response.ok) say(done);
  } catch {
    say('Not saved: the server does not answer. Try again.', true);
  } finally {
    setBusy(false);
    if (waits) timer = setTimeout(() => act('next', {}, ''), LOOK_AGAIN_MS); // also after a request that failed
  }
}

function setBusy(value) {
  busy = value;
  document.querySelector('main').ariaBusy = value; // a disabled button would lose the focus
}

function show(state) {
  const isKnown = state.person !== null;
  element('join').hidden = isKnown;
  for (const id of ['who', 'progress']) element(id).hidden = !isKnown;
  element('pair').hidden = state.pair === null;
  element('done').hidden = !isKnown || state.pair !== null;
  if (!isKnown) {
    element('name').focus();
    return;
  }
  element('who').textContent = state.person;
  showProgress(state.progress);
  const isNew = pair?.id !== state.pair?.id;
  waits = state.pair === null && state.progress.open > 0;
  pair = state.pair;
  if (pair !== null && isNew) {
    for (const id of ['prompt', 'left', 'right']) element(id).textContent = pair[id];
    element('comment').value = pair.comment;
    element('comment').blur();
    window.scrollTo(0, 0);
  } else if (pair === null) {
    element('done-text').textContent = waits
      ? `There are no pairs for you now. Others are judging the last ${state.progress.open}; this page checks again.`
      : 'All done. Thank you!';
  }
}

function showProgress({ mine, all, wanted }) {
  const bar = document.querySelector('progress');
  bar.max = Math.max(wanted, 1);
  bar.value = all;
  element('counts').textContent = `${all} of ${wanted} judgements, ${mine} by you`;
}

function choose(choice) {
  if (choice === 'undo') act('undo', {}, 'Taken back.');
  else if (pair !== null) {
    act('judge', { pair: pair.id, choice, comment: element('comment').value }, `Saved: ${CHOICES[choice]}.`);
  }
}

document.addEventListener('keydown', (event) => {
  const isTyping = event.target.matches('input, textarea');
  if (event.key === 'Escape' && isTyping) event.target.blur();
  if (isTyping || event.repeat || event.ctrlKey || event.metaKey || event.altKey || element('who').hidden) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === 'c' && pair !== null) element('comment').focus();
  else if (KEYS[key]) choose(KEYS[key]);
  else return;
  event.preventDefault();
});
for (const button of document.querySelectorAll('[data-choice]')) {
  button.addEventListener('click', () => choose(button.dataset.choice));
}
for (const id of ['undo', 'undo-last']) element(id).addEventListener('click', () => choose('undo'));
element('join').addEventListener('submit', (event) => {
  event.preventDefault();
  act('join', { name: element('name').value }, '');
});

history.replaceState(null, '', '/'); // the token has become a cookie
act('next', {}, '');
