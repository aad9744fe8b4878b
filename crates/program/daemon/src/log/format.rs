//! `--log-format`: format of log messages, as text, as JSON, or for systemd's journal.

use clap::ValueEnum;
use rustix::fs::fstat;
use serde_json::json;
use std::fmt::{self, Arguments, Write as _};
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use tracing::{Level, Metadata};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FormatFields, MakeWriter};

use crate::log::stderr::LogLines;

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text for people: time, level, crate, message; with colours on a terminal
    Text,
    /// A JSON object on each line
    Json,
    /// For systemd's journal: level prefix (sd-daemon(3)), no time
    Journal,
}

impl LogFormat {
    /// Returns the default format: the journal's if standard error is connected to it
    /// (systemd.exec(5), `JOURNAL_STREAM`), otherwise text.
    pub fn usual() -> Self {
        let stream = std::env::var("JOURNAL_STREAM").ok();
        if stream.is_some_and(|stream| is_standard_error(&stream)) {
            Self::Journal
        } else {
            Self::Text
        }
    }
}

/// Returns whether `DEVICE:INODE` identifies standard error. Otherwise the variable was inherited
/// from a parent process.
fn is_standard_error(stream: &str) -> bool {
    let Ok(stat) = fstat(io::stderr()) else {
        return false;
    };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Format of the process's last message, which is no log line. The process has one log, and errors
/// before any other value exists.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Returns the last message of the process (see [`crate::log::stderr::say`]) in the format of the
/// log.
pub fn last_line(words: Arguments<'_>) -> String {
    let words = words.to_string();
    let plain = escaped(&words);
    match FORMAT.get() {
        None | Some(LogFormat::Text) => format!("vnvme: {plain}\n"),
        Some(LogFormat::Journal) => format!("{}vnvme: {plain}\n", prefix(Level::ERROR)),
        Some(LogFormat::Json) => {
            let mut timestamp = String::new();
            // The time is left out if it cannot be written.
            let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
            let line = json!({
                "timestamp": timestamp,
                "level": "ERROR",
                "fields": { "message": words },
                "target": "vnvme",
            });
            format!("{line}\n")
        }
    }
}

/// Sets the format of the process's last message.
pub fn set(format: LogFormat) {
    let _ = FORMAT.set(format);
}

/// Returns the journal's prefix for a level (sd-daemon(3)).
fn prefix(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        _ => "<7>",
    }
}

/// Returns whether log messages have colours, which is for terminals only.
pub fn has_colours() -> bool {
    io::stderr().is_terminal()
}

/// Formatter of the message and fields of log lines. Control characters are escaped: a remote
/// server, a guest or a client may have chosen the text, and must neither control the terminal nor
/// forge lines.
#[derive(Debug, Default)]
pub struct EscapedFields(DefaultFields);

impl<'w> FormatFields<'w> for EscapedFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> fmt::Result {
        self.0
            .format_fields(Writer::new(&mut Escaped(&mut writer)), fields)
    }
}

/// Writer that escapes control characters, and characters that change the direction of text.
struct Escaped<W>(W);

impl<W: fmt::Write> fmt::Write for Escaped<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(is_control) {
            match part.chars().next_back() {
                Some(last) if is_control(last) => {
                    let plain = part.len() - last.len_utf8();
                    self.0.write_str(part.get(..plain).unwrap_or_default())?;
                    write!(self.0, "{}", last.escape_default())?;
                }
                _ => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

/// Returns whether a character controls a terminal, ends a line, or changes the direction of text.
fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a text of the process's last message with its control characters escaped, except for
/// the ends of lines.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for line in text.split_inclusive('\n') {
        let (line, end) = line
            .strip_suffix('\n')
            .map_or((line, ""), |line| (line, "\n"));
        // A string takes everything.
        let _ = Escaped(&mut escaped).write_str(line);
        escaped.push_str(end);
    }
    escaped
}

/// Writer of log messages for the journal, each line with its level.
pub struct JournalLines;

/// Writer of one message with a level.
pub struct JournalLine(Level);

impl<'a> MakeWriter<'a> for JournalLines {
    type Writer = JournalLine;

    fn make_writer(&'a self) -> JournalLine {
        JournalLine(Level::INFO)
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> JournalLine {
        JournalLine(*metadata.level())
    }
}

impl Write for JournalLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // The prefix applies to one line. A text of several lines becomes several entries, each
        // with the level.
        let lines = line.split_inclusive(|byte| *byte == b'\n');
        let text = lines.flat_map(|line| [prefix(self.0).as_bytes(), line]);
        LogLines.write_all(&text.collect::<Vec<_>>().concat())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_fields_are_escaped() {
        let mut text = String::new();
        let lying = "QEMU\u{1b}[2J\r\n<3>forged\u{9b}1m\u{202e}\t\"é\"";
        Escaped(&mut text).write_str(lying).unwrap();
        let shown = "QEMU\\u{1b}[2J\\r\\n<3>forged\\u{9b}1m\\u{202e}\\t\"é\"";
        assert_eq!(text, shown);
        assert_eq!(escaped("a\nb\u{7}\n"), "a\nb\\u{7}\n");
        assert_eq!(escaped("plain"), "plain");
    }

    #[test]
    fn journal_is_detected_by_stream() {
        let stat = fstat(io::stderr()).unwrap();
        assert!(is_standard_error(&format!(
            "{}:{}",
            stat.st_dev, stat.st_ino
        )));
        for other in ["", "1:2", "8:", "none"] {
            assert!(!is_standard_error(other), "{other}");
        }
    }
}
