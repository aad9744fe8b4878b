//! The terminal: raw while it is used, and as it was afterwards.

use super::screen::{Key, Line};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The other screen of the terminal, without the cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// The size where the terminal does not say.
const SIZE: (usize, usize) = (80, 24);

/// A terminal that is drawn on.
pub struct Terminal {
    before: Termios,
}

impl Terminal {
    /// Takes the terminal.
    ///
    /// # Errors
    /// Input or output is none.
    pub fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin)?;
        tcgetattr(io::stdout())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        let terminal = Self { before };
        write(ENTER)?;
        Ok(terminal)
    }

    /// Columns and lines.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => SIZE,
        }
    }

    /// Draws all lines, and clears the rest.
    ///
    /// # Errors
    /// The terminal has gone.
    pub fn draw(&self, lines: &[Line]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (i, line) in lines.iter().enumerate() {
            if i > 0 {
                text.push_str("\r\n");
            }
            match line.cursor {
                true => text.push_str(&format!("\x1b[7m{}\x1b[0m", line.text)),
                false => text.push_str(&line.text),
            }
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        write(&text)
    }

    /// Keys that are pressed until then; returns with the first.
    ///
    /// # Errors
    /// The terminal has gone.
    pub fn keys(&self, until: Instant) -> io::Result<Vec<Key>> {
        let stdin = io::stdin();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()) as _,
            };
            let mut fds = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return Ok(Vec::new()),
                // The window has another size.
                Err(Errno::INTR) if left > Duration::ZERO => return Ok(Vec::new()),
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            let mut bytes = [0; 64];
            let read = rustix::io::read(&stdin, &mut bytes)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let keys = decode(bytes.get(..read).unwrap_or_default());
            if !keys.is_empty() {
                return Ok(keys);
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// What a terminal sends for keys; what is not known is left out.
fn decode(bytes: &[u8]) -> Vec<Key> {
    let text = String::from_utf8_lossy(bytes);
    let (mut keys, mut rest) = (Vec::new(), &*text);
    while let Some(c) = rest.chars().next() {
        if let Some(sequence) = rest.strip_prefix("\x1b[").or(rest.strip_prefix("\x1bO")) {
            let end = sequence.find(|c: char| ('@'..='~').contains(&c));
            match end.and_then(|end| sequence.get(end..=end)) {
                Some("A") => keys.push(Key::Up),
                Some("B") => keys.push(Key::Down),
                _ => {}
            }
            rest = end
                .and_then(|end| sequence.get(end + 1..))
                .unwrap_or_default();
            continue;
        }
        match c {
            '\r' | '\n' => keys.push(Key::Enter),
            '\x1b' => keys.push(Key::Escape),
            '\x08' | '\x7f' => keys.push(Key::Backspace),
            c => keys.push(Key::Char(c)),
        }
        rest = rest.get(c.len_utf8()..).unwrap_or_default();
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_what_terminals_send() {
        assert_eq!(
            decode(b"\x1b[Aq\x1bOB\r\x7f\x1b[5~\xc3\xa9\x1b"),
            [
                Key::Up,
                Key::Char('q'),
                Key::Down,
                Key::Enter,
                Key::Backspace,
                Key::Char('é'),
                Key::Escape
            ]
        );
        assert_eq!(decode(b"\x1b["), []);
        assert_eq!(decode(b""), []);
    }
}
