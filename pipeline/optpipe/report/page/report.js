"use strict";
// Sorting and filtering of tables, and tooltips from the marks' own labels. Nothing is loaded, nothing is sent.
for (const tools of document.querySelectorAll(".table-tools")) {
  const table = document.getElementById(tools.dataset.for);
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = tools.querySelector("[data-filter]");
  const choices = [...tools.querySelectorAll("[data-choice]")];
  const count = tools.querySelector(".count");
  const sum = (some) => some.reduce((total, row) => total + Number(row.dataset.count ?? 1), 0);

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const pressed = choices.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.choice);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!pressed.length || pressed.includes(row.dataset.group));
      row.hidden = !fits;
    }
    count.textContent = `${sum(rows.filter((row) => !row.hidden))} of ${sum(rows)}`;
  }

  search.addEventListener("input", show);
  for (const choice of choices) {
    choice.addEventListener("click", () => {
      choice.setAttribute("aria-pressed", String(choice.getAttribute("aria-pressed") !== "true"));
      show();
    });
  }
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort;
      const numeric = head.classList.contains("number");
      const order = (one, other) => {
        const [left, right] = [key(one), key(other)];
        if (left === "" || right === "") return (left === "") - (right === "");  // what is unknown stays last
        const found = numeric ? Number(left) - Number(right) : left.localeCompare(right, "en", { numeric: true });
        return down ? -found : found;
      };
      body.append(...[...rows].sort(order));
    });
  });
}

for (const code of document.querySelectorAll("main code")) {
  if (!/^(optpipe|sha256sum) /.test(code.textContent) || code.closest("table")) continue;
  code.classList.add("command");
  const copy = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
  copy.setAttribute("aria-label", `Copy ${code.textContent}`);
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  code.after(copy);
}

const folded = [...document.querySelectorAll("details:not(.raw)")];
addEventListener("beforeprint", () => { for (const one of folded) { one.dataset.open = one.open; one.open = true; } });
addEventListener("afterprint", () => { for (const one of folded) one.open = one.dataset.open === "true"; });

const tip = document.getElementById("tip");
function showTip(event) {
  const mark = event.target.closest?.("figure svg [aria-label][role='graphics-symbol']");
  if (!mark) { tip.hidden = true; return; }
  tip.textContent = mark.getAttribute("aria-label").replaceAll("; ", "\n");
  tip.style.whiteSpace = "pre-line";
  tip.hidden = false;
  const box = mark.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${(above > 0 ? above : box.bottom + 8) + scrollY}px`;
}
document.addEventListener("pointerover", showTip);
document.addEventListener("focusin", showTip);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
