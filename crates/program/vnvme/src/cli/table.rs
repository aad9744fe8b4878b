//! Tables for people: columns as wide as their widest cell, numbers aligned on the right.

use output::{OutputError, outln};

/// Heading and alignment of a column in a table that is printed.
#[derive(Clone, Copy, Debug)]
pub enum Column {
    /// Column of words, aligned to the left.
    Left(&'static str),
    /// Column of numbers, aligned to the right.
    Right(&'static str),
}

impl Column {
    fn head(self) -> &'static str {
        match self {
            Self::Left(head) | Self::Right(head) => head,
        }
    }
}

/// Table of text with `N` columns, for output of commands.
#[derive(Debug)]
pub struct TextTable<const N: usize> {
    columns: [Column; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> TextTable<N> {
    /// Creates a table without rows.
    pub fn new(columns: [Column; N]) -> Self {
        Self {
            columns,
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells);
    }

    pub fn lines(&self) -> Vec<String> {
        let heads = self.columns.map(|column| column.head().to_owned());
        let all = || std::iter::once(&heads).chain(&self.rows);
        let width = |at: usize| {
            let cells = all().filter_map(|row| row.get(at));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..N).map(width).collect();
        let line = |row: &[String; N]| {
            let cells = row.iter().zip(&self.columns).zip(&widths);
            let cells = cells.map(|((cell, column), width)| match column {
                Column::Left(_) => format!("{cell:<width$}"),
                Column::Right(_) => format!("{cell:>width$}"),
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            line.trim_end().to_owned()
        };
        all().map(line).collect()
    }

    /// Prints the table with aligned columns.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn print(&self) -> Result<(), OutputError> {
        for line in self.lines() {
            outln!("{line}");
        }
        Ok(())
    }
}

/// Formats a number of bytes in the largest unit that leaves it at least 1, exactly where that is
/// short.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let unit = units.get(power).copied().unwrap_or_default();
    let one = 1u64 << (10 * power);
    match bytes % one {
        0 => format!("{} {unit}", bytes / one),
        _ => format!("{:.1} {unit}", bytes as f64 / one as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned() {
        let mut table = TextTable::new([
            Column::Left("NAME"),
            Column::Right("SIZE"),
            Column::Left("IN"),
        ]);
        table.row(["ä".into(), "5".into(), String::new()]);
        table.row(["longer".into(), "12345".into(), "x".into()]);
        let wanted = ["NAME     SIZE  IN", "ä           5", "longer  12345  x"];
        assert_eq!(table.lines(), wanted);
    }

    #[test]
    fn sizes_are_abbreviated() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 20, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
