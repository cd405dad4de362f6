// Values under the pointer, at once and in the look of the page.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const title of document.querySelectorAll("svg title")) {
    const mark = title.parentNode;
    if (mark.localName === "svg") {
      mark.setAttribute("aria-label", title.textContent);
      mark.removeAttribute("aria-labelledby");
      const text = mark.querySelector(":scope > desc");
      if (text) mark.setAttribute("aria-describedby", text.id);
    } else {
      mark.dataset.tip = title.textContent;
    }
    title.remove();
  }
  for (const cell of document.querySelectorAll("td[title]")) {
    cell.dataset.tip = cell.title;
    cell.removeAttribute("title");
  }
  const show = (event) => {
    const mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const { width, height } = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 12, innerWidth - width - 8);
    const above = event.clientY - height - 12;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above < 8 ? event.clientY + 18 : above) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
