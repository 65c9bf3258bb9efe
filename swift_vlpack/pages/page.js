"use strict";
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const order = ["system", "light", "dark"];
  const show = (theme) => {
    if (theme === "system") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    button.textContent = "Theme: " + theme;
  };
  let theme = "system";
  try { theme = localStorage.getItem("vlpack-theme") || theme; } catch { /* a page from a file may have no storage */ }
  // `page.html#dark` opens in that theme, for links and screenshots.
  if (order.includes(location.hash.slice(1))) theme = location.hash.slice(1);
  if (!order.includes(theme)) theme = "system";
  show(theme);
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    show(theme);
    try { localStorage.setItem("vlpack-theme", theme); } catch { /* as above */ }
  });
})();
