//! Standard error with a reader that may stop reading without closing it: a pager, a log collector
//! that hangs. A write would then block its thread, be it a worker or the thread that ends the
//! process. So a line that finds no room is lost, and the next written line is preceded by the
//! number of lost lines.

use crate::log::format;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt::Arguments;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest piece that is written at one time, in bytes: where there is room for anything in a pipe,
/// there is for so much (`PIPE_BUF`).
const PIECE: usize = 4096;
/// Time that the first line waits for room. The lines after it do not wait.
const FIRST_LINE_TIMEOUT: Duration = Duration::from_millis(10);
/// Maximum time that the last message of the process waits for room in the pipe.
const LAST_WAIT: Duration = Duration::from_millis(200);

/// Number of log lines that were lost because one reader did not read.
struct LostLines(AtomicU64);

/// Losses of standard error, which the process has one of: lines are written before any other value
/// exists.
static LOSSES: LostLines = LostLines(AtomicU64::new(0));

/// Writer of log lines to standard error. Each write is one line.
pub struct LogLines;

impl Write for LogLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LOSSES.write(io::stderr().as_fd(), line, FIRST_LINE_TIMEOUT);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the reason for the end of the process. A reader that does not read it does not delay the
/// end.
pub fn say(words: Arguments<'_>) {
    let line = format::last_line(words);
    LOSSES.write(io::stderr().as_fd(), line.as_bytes(), LAST_WAIT);
}

impl LostLines {
    /// Writes a log line to `fd`, if that does not block for longer than `limit`.
    fn write(&self, fd: BorrowedFd<'_>, line: &[u8], limit: Duration) {
        let lost = self.0.load(Ordering::Relaxed);
        let limit = match lost {
            0 => limit,
            _ => Duration::ZERO,
        };
        if !has_room(fd, limit) {
            self.0.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // Only one of several threads that write at the same time reports the losses.
        let told = self.0.fetch_sub(lost, Ordering::Relaxed) >= lost && lost > 0;
        let note = if told {
            format!("vnvme: {lost} log lines were lost because their reader was too slow\n")
        } else {
            String::new()
        };
        let pieces = note.as_bytes().chunks(PIECE).chain(line.chunks(PIECE));
        for (at, piece) in pieces.enumerate() {
            // Errors (the reader has closed the pipe, no descriptor) are ignored.
            if at > 0 && !has_room(fd, Duration::ZERO) || write(fd, piece).is_err() {
                return;
            }
        }
    }
}

fn write(fd: BorrowedFd<'_>, piece: &[u8]) -> rustix::io::Result<()> {
    loop {
        match rustix::io::write(fd, piece) {
            Err(rustix::io::Errno::INTR) => {}
            written => return written.map(drop),
        }
    }
}

/// Returns whether writing a part of a line would not block, and would not be an error.
fn has_room(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(limit.subsec_nanos()) as _,
    };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    poll(&mut fds, Some(&time)) != Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::{fcntl_setpipe_size, pipe};
    use std::fs::File;
    use std::io::Read;

    #[test]
    fn unread_log_lines_are_dropped_and_counted() {
        let (read, writer) = pipe().unwrap();
        fcntl_setpipe_size(&writer, PIECE).unwrap();
        let losses = LostLines(AtomicU64::new(0));
        let say = |line: &str| losses.write(writer.as_fd(), line.as_bytes(), FIRST_LINE_TIMEOUT);
        let long = "x".repeat(PIECE - 1) + "\n";
        say(&long);
        // These would block for ever.
        (0..10).for_each(|_| say("lost\n"));
        let mut read = File::from(read);
        let mut text = vec![0; PIECE];
        read.read_exact(&mut text).unwrap();
        assert_eq!(text, long.as_bytes());
        say("seen\n");
        say("seen, too\n");
        drop(writer);
        let mut rest = String::new();
        read.read_to_string(&mut rest).unwrap();
        let note = "vnvme: 10 log lines were lost because their reader was too slow\n";
        // In a pipe of one page the second write may find no room.
        assert!(rest.starts_with(note), "{rest}");
    }

    #[test]
    fn closed_log_reader_is_no_error() {
        let (read, writer) = pipe().unwrap();
        drop(read);
        let losses = LostLines(AtomicU64::new(0));
        losses.write(writer.as_fd(), b"nobody\n", FIRST_LINE_TIMEOUT);
        assert_eq!(losses.0.into_inner(), 0);
    }
}
