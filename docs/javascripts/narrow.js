// What narrow screens need and a style sheet cannot tell; stylesheets/site.css uses it.

// A name in code stays whole, also after a hyphen; a longer one has places to break.
for (const code of document.querySelectorAll("article :is(code, .doc-object-name):not(pre *)"))
  if (!code.children.length)
    code.innerHTML = code.innerHTML.replace(/\S+/g, name =>
      name.length > 36 ? name.replace(/[/.,|(]/g, "$&<wbr>")
        : name.includes("-") ? `<span>${name}</span>` : name)

// A table of sentences or long names is a list of its rows; cells have their column's heading.
for (const table of document.querySelectorAll("article table:not([class])")) {
  const [head, ...rows] = table.rows
  const wide = head.cells.length > 2
  const texts = [...table.querySelectorAll(wide ? "td + td, td code" : "code")]
  const isName = text => !wide && text.closest("td:first-child, th:first-child")
  const isLong = text => text.textContent.length > (isName(text) ? 16 : 30)
  if (!texts.some(isLong)) continue
  table.dataset.rows = ""
  for (const row of wide ? rows : [])
    for (const cell of row.cells) {
      const heading = head.cells[cell.cellIndex].textContent
      if (heading) cell.dataset.heading = heading
    }
}
