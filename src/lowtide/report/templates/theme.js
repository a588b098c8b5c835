// Light or dark: what the system asks for, until the reader presses the button. Paper is light.
"use strict";
const Theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let chosen = null;
  const apply = (dark) => {
    root.dataset.theme = dark ? "dark" : "light";
    for (const listener of listeners) listener();
  };
  const current = () => (chosen === null ? system.matches : chosen);
  apply(current());
  system.addEventListener("change", () => apply(current()));
  addEventListener("beforeprint", () => apply(false));
  addEventListener("afterprint", () => apply(current()));
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      chosen = !current();
      apply(chosen);
    });
  });
  return {
    onChange: (listener) => listeners.push(listener),
    colour: (name) => getComputedStyle(root).getPropertyValue(name).trim(),
  };
})();
