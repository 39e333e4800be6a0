
// Puts the reader of rollouts.js over the rows that are in the page; both are in one module.
document.querySelectorAll('.reader').forEach((place) => {
  mountRollouts(place, embeddedSource(JSON.parse(place.nextElementSibling.textContent)));
});
