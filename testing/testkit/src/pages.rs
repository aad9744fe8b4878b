//! Commands and configuration on markdown pages, so that tests can run them as printed: fenced
//! blocks, and code in the running text.

use std::fmt;
use std::mem;

/// Code of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Path of the page, as given to [`pieces`].
    pub page: String,
    /// Line of the page with the first line of the text.
    pub line: usize,
    /// Whether the code is a fenced block, and not a span of the running text.
    pub is_block: bool,
    /// Lines of a block, each with its line feed; a span as one line.
    pub text: String,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.page, self.line)
    }
}

impl Piece {
    /// Returns a script for `sh` that runs the commands of the piece in one shell. The script ends
    /// at the first command that fails, and prints its page, line and text then.
    #[must_use]
    pub fn script(&self) -> String {
        let commands = self.commands().into_iter();
        commands.map(|command| self.checked(&command)).collect()
    }

    /// Returns the same script for commands whose last one is a server, which takes the place of
    /// the shell: a signal to the shell's process reaches it.
    #[must_use]
    pub fn server_script(&self) -> String {
        let mut commands = self.commands();
        let server = commands.pop().map_or(String::new(), |(_, server)| server);
        let before = commands.iter().map(|command| self.checked(command));
        before.collect::<String>() + &format!("exec {server}\n")
    }

    fn checked(&self, (line, command): &(usize, String)) -> String {
        let failed = format!("{}:{line}: {command}", self.page).replace('\'', r"'\''");
        format!("{command} || {{ printf '%s: failed\\n' '{failed}' >&2; exit 1; }}\n")
    }

    /// Returns the commands with their lines. A line that ends in a backslash continues.
    fn commands(&self) -> Vec<(usize, String)> {
        let mut commands: Vec<(usize, String)> = Vec::new();
        let mut continues = false;
        for (at, line) in self.text.lines().enumerate() {
            match commands.last_mut() {
                Some((_, command)) if continues => {
                    command.push('\n');
                    command.push_str(line);
                }
                _ => commands.push((self.line + at, line.to_owned())),
            }
            continues = line.ends_with('\\');
        }
        commands.retain(|(_, command)| !command.trim().is_empty());
        commands
    }
}

/// Returns the code of a page, in the order of the page.
#[must_use]
pub fn pieces(page: &str, markdown: &str) -> Vec<Piece> {
    let mut found = Vec::new();
    let mut block: Option<Piece> = None;
    let mut paragraph = String::new();
    for (line, text) in (1..).zip(markdown.lines()) {
        let is_fence = text.trim_start().starts_with("```");
        match &mut block {
            Some(_) if is_fence => found.extend(block.take()),
            Some(block) => {
                block.text.push_str(text);
                block.text.push('\n');
            }
            None if is_fence || text.trim().is_empty() => {
                spans(page, line, &mem::take(&mut paragraph), &mut found);
                block = is_fence.then(|| Piece {
                    page: page.to_owned(),
                    line: line + 1,
                    is_block: true,
                    text: String::new(),
                });
            }
            None => {
                paragraph.push_str(text);
                paragraph.push('\n');
            }
        }
    }
    let end = markdown.lines().count() + 1;
    spans(page, end, &paragraph, &mut found);
    // A block without an end is found, too.
    found.extend(block);
    found
}

/// Appends the spans of a paragraph that ends before line `end`.
fn spans(page: &str, end: usize, paragraph: &str, found: &mut Vec<Piece>) {
    let mut line = end - paragraph.lines().count();
    for (at, part) in paragraph.split('`').enumerate() {
        if at % 2 == 1 {
            let words: Vec<&str> = part.split_whitespace().collect();
            found.push(Piece {
                page: page.to_owned(),
                line,
                is_block: false,
                text: words.join(" "),
            });
        }
        line += part.matches('\n').count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# A page\n\nRun `one`, or `one\n  --more`.\n\n```\ncd a && make\nqemu \\\n  -m 1\n\
                        \nfalse\n```\n\n- `two` and\n  `three`\n";

    #[test]
    fn blocks_and_spans_have_their_lines() {
        let found = pieces("a.md", PAGE);
        let lines = |piece: &Piece| (piece.line, piece.is_block, piece.text.clone());
        let found: Vec<_> = found.iter().map(lines).collect();
        let block = "cd a && make\nqemu \\\n  -m 1\n\nfalse\n";
        let span = |line, text: &str| (line, false, text.to_owned());
        assert_eq!(
            found,
            [
                span(3, "one"),
                span(3, "one --more"),
                (7, true, block.to_owned()),
                span(14, "two"),
                span(15, "three"),
            ]
        );
    }

    #[test]
    fn script_names_page_and_line_of_failed_command() {
        let text = "true\nf() { \\\n  false; }\n\nf 'a b' && true\necho unreached\n";
        let piece = pieces("a.md", &format!("```\n{text}```\n")).remove(0);
        let output = std::process::Command::new("sh")
            .args(["-c", &piece.script()])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty(), "{output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(told, "a.md:6: f 'a b' && true: failed\n");
        assert!(piece.server_script().ends_with("\nexec echo unreached\n"));
    }
}
