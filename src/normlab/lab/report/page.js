"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const hint = document.createElement("span");
  hint.className = "hint";
  hint.textContent = "; a click on a heading sorts";
  table.caption?.firstElementChild.append(hint);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = column ? "descending" : "ascending";
      const other = column ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach(h => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const value = row => column ? parseFloat(row.cells[column].dataset.value) : row.cells[0].textContent.trim();
      const compare = (a, b) => {
        if (!column) return sign * a.localeCompare(b, "en", { numeric: true });
        return Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : sign * (a - b);
      };
      body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
    });
  });
}
const cut = () => document.querySelectorAll(".box").forEach(b => b.classList.toggle("cut", b.scrollWidth > b.clientWidth + 1));
cut();
addEventListener("resize", cut);
addEventListener("toggle", cut, true);
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach(d => { d.open = true; });
});
addEventListener("afterprint", () => opened.forEach(d => { d.open = false; }));
