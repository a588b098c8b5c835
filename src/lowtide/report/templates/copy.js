// Buttons that copy the text before them; where the browser does not allow that, the text is selected.
"use strict";
addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll("button.copy")) {
    const text = button.parentElement.querySelector("code");
    const select = () => {
      const range = document.createRange();
      range.selectNodeContents(text);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
    };
    const say = (words) => {
      button.textContent = words;
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    };
    button.addEventListener("click", () => {
      if (!navigator.clipboard) { select(); return say("Selected"); }
      navigator.clipboard.writeText(text.textContent).then(() => say("Copied"), () => { select(); say("Selected"); });
    });
  }
});
