// Mounts the reader of recorded sequences with this server as source, and passes on new phases.

import { fetchSource, mountRollouts } from '/report/rollouts.js';

const LOOK_AGAIN_MS = 30000;
const chosen = document.getElementById('run');
let reader;
let known = '';

async function look() {
  try {
    const response = await fetch('/api/runs');
    if (!response.ok) throw new Error((await response.text()).trim());
    const { phases } = (await response.json())[chosen.value];
    document.getElementById('status').textContent = '';
    if (reader === undefined) {
      const source = fetchSource(`/api/rollouts?run=${chosen.value}`, phases);
      reader = mountRollouts(document.getElementById('reader'), source);
    } else if (known !== String(phases)) reader.refresh(phases);
    known = String(phases);
  } catch (error) {
    document.getElementById('status').textContent = `The server does not answer: ${error.message}`;
  }
}

chosen.addEventListener('change', () => {
  reader = undefined;
  look();
});
history.replaceState(null, '', '/'); // the token has become a cookie
look();
setInterval(look, LOOK_AGAIN_MS);
