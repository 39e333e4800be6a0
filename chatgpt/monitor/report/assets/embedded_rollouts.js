
// Mounts the reader of rollouts.js with the rows in the page as source; both are in one module.
document.querySelectorAll('.reader').forEach((place) => {
  mountRollouts(place, embeddedSource(JSON.parse(place.nextElementSibling.textContent)));
});
