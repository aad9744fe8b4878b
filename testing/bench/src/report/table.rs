//! Tables for the terminal and for the HTML page.

use super::html::escape;

/// A row: its name, whether its figures are quoted from a document, and its cells.
#[derive(Clone, Debug, Default)]
pub struct Row {
    pub name: String,
    /// Whether the row is quoted from a document instead of measured.
    pub quoted: bool,
    pub cells: Vec<String>,
}

/// A table of the report. Every row has one cell for each column.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub title: String,
    pub columns: Vec<String>,
    /// Quantity that the column names stand for, such as "depth"; empty if the names include it.
    pub across: &'static str,
    pub rows: Vec<Row>,
    /// Note for the reader, printed below the table.
    pub note: &'static str,
}

impl Table {
    /// Creates an empty table.
    pub fn new(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            title: title.into(),
            columns: columns.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Adds a row of measured figures, unless it contains none.
    pub fn row(&mut self, name: impl Into<String>, cells: Vec<Option<String>>) {
        if cells.iter().all(Option::is_none) {
            return;
        }
        let cells = cells.into_iter();
        self.rows.push(Row {
            name: name.into(),
            quoted: false,
            cells: cells.map(|c| c.unwrap_or("\u{2013}".into())).collect(),
        });
    }

    /// Adds a row in a subdued style, unless it contains no figure: one quoted from a document.
    pub fn quote(&mut self, name: impl Into<String>, cells: Vec<Option<String>>) {
        let before = self.rows.len();
        self.row(name, cells);
        if let Some(row) = self.rows.get_mut(before) {
            row.quoted = true;
        }
    }

    /// Formats the table for the terminal.
    pub fn text(&self) -> String {
        let width = |text: &String| text.chars().count();
        let names = self.rows.iter().map(|row| width(&row.name));
        let first = names.chain([self.across.chars().count()]).max();
        let first = first.unwrap_or(0);
        let widths = self.columns.iter().enumerate().map(|(i, column)| {
            let cells = self.rows.iter().filter_map(|row| row.cells.get(i));
            cells.chain([column]).map(width).max().unwrap_or(0)
        });
        let widths: Vec<usize> = widths.collect();
        let line = |name: &str, cells: &[String]| {
            let mut text = format!("  {name:first$}");
            for (cell, width) in cells.iter().zip(&widths) {
                text.push_str(&format!("  {cell:>width$}"));
            }
            text.push('\n');
            text
        };
        let mut text = format!("{}\n", self.title);
        text.push_str(&line(self.across, &self.columns));
        for row in &self.rows {
            text.push_str(&line(&row.name, &row.cells));
        }
        if !self.note.is_empty() {
            text.push_str(&format!("  {}\n", self.note));
        }
        text
    }

    /// Formats the table for the page.
    pub fn html(&self) -> String {
        let cells = |cells: &[String], name: &str| {
            let cells = cells
                .iter()
                .map(|cell| format!("<{name}>{}</{name}>", escape(cell)));
            cells.collect::<String>()
        };
        let (title, across) = (escape(&self.title), escape(self.across));
        let mut html = format!(
            "<table><caption>{title}</caption>\n<thead><tr><th>{across}</th>{}</tr></thead>\n<tbody>\n",
            cells(&self.columns, "th")
        );
        for row in &self.rows {
            let class = if row.quoted { " class=\"quoted\"" } else { "" };
            let (name, cells) = (escape(&row.name), cells(&row.cells, "td"));
            html += &format!("<tr{class}><th>{name}</th>{cells}</tr>\n");
        }
        html += "</tbody></table>\n";
        if !self.note.is_empty() {
            html += &format!("<p class=\"note\">{}</p>\n", escape(self.note));
        }
        html
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_empty_rows_are_omitted() {
        let mut table = Table::new("IOPS", ["1", "32"]);
        table.across = "depth";
        table.row("off", vec![Some("25.1k".into()), None]);
        table.row("nothing", vec![None, None]);
        let cells = ["1", "1000000"].map(|cell| Some(cell.into()));
        table.quote("a document <on>", cells.into());
        let text = table.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[1].trim_start().starts_with("depth "), "{text}");
        let widths: Vec<usize> = lines.iter().skip(1).map(|l| l.chars().count()).collect();
        assert!(widths.windows(2).all(|w| w[0] == w[1]), "{text}");
        let html = table.html();
        assert!(html.contains("a document &lt;on&gt;") && html.contains("class=\"quoted\""));
    }
}
