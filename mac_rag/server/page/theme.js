// Loaded before the page is drawn, so that it does not flash in the other colours.
try { document.documentElement.dataset.theme = localStorage.getItem("theme") || ""; } catch (error) { /* no storage: the system's colours */ }
