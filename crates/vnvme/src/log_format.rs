//! `--log-format`: format of log messages, as text, as JSON, or for systemd's journal.

use clap::ValueEnum;
use rustix::fs::fstat;
use serde_json::json;
use std::fmt::Arguments;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::stderr::LogLines;

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

/// Format of the process's last message, which is no log line.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Returns the last message of the process (see [`crate::stderr::say`]) in the format of the log.
pub fn last_line(words: Arguments<'_>) -> String {
    match FORMAT.get() {
        None | Some(LogFormat::Text) => format!("vnvme: {words}\n"),
        Some(LogFormat::Journal) => format!("{}vnvme: {words}\n", prefix(Level::ERROR)),
        Some(LogFormat::Json) => {
            let mut timestamp = String::new();
            // The time is left out if it cannot be written.
            let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
            let line = json!({
                "timestamp": timestamp,
                "level": "ERROR",
                "fields": { "message": words.to_string() },
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
