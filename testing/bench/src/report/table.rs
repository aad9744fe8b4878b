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
    pub note: String,
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

    /// Adds a row, unless it contains no figure.
    pub fn row(&mut self, name: impl Into<String>, quoted: bool, cells: Vec<Option<String>>) {
        if cells.iter().all(Option::is_none) {
            return;
        }
        self.rows.push(Row {
            name: name.into(),
            quoted,
            cells: cells
                .into_iter()
                .map(|c| c.unwrap_or_else(|| "\u{2013}".into()))
                .collect(),
        });
    }

    /// Formats the table for the terminal.
    pub fn text(&self) -> String {
        let width = |text: &str| text.chars().count();
        let first = self.rows.iter().map(|r| width(&r.name)).max().unwrap_or(0);
        let first = first.max(width(self.across));
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(i, column)| {
                let cells = self.rows.iter().filter_map(|r| r.cells.get(i));
                cells
                    .map(|c| width(c))
                    .max()
                    .unwrap_or(0)
                    .max(width(column))
            })
            .collect();
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
        let mut html = format!(
            "<table><caption>{}</caption>\n<thead><tr><th>{}</th>",
            escape(&self.title),
            escape(self.across)
        );
        for column in &self.columns {
            html.push_str(&format!("<th>{}</th>", escape(column)));
        }
        html.push_str("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            let class = if row.quoted { " class=\"quoted\"" } else { "" };
            html.push_str(&format!("<tr{class}><th>{}</th>", escape(&row.name)));
            for cell in &row.cells {
                html.push_str(&format!("<td>{}</td>", escape(cell)));
            }
            html.push_str("</tr>\n");
        }
        html.push_str("</tbody></table>\n");
        if !self.note.is_empty() {
            html.push_str(&format!("<p class=\"note\">{}</p>\n", escape(&self.note)));
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
        table.row("off", false, vec![Some("25.1k".into()), None]);
        table.row("nothing", false, vec![None, None]);
        table.row(
            "a document <on>",
            true,
            vec![Some("1".into()), Some("1000000".into())],
        );
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
