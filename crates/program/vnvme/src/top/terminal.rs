//! Terminal in raw mode, with its settings restored however the program ends or is suspended.

use super::screen::{Key, Line};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, pipe};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, Once, PoisonError};
use std::time::Instant;

/// Escape sequences that enter the alternate screen and hide the cursor; the next constant reverses
/// them.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Number of columns and lines assumed for a terminal that does not report its size.
const SIZE: (usize, usize) = (80, 24);
/// Signals that end the program, suspend it, or report a new size of the window.
const SIGNALS: [i32; 6] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH];

/// Settings of the terminal before it was changed; `None` while it is unchanged.
static TAKEN: Mutex<Option<Termios>> = Mutex::new(None);

/// Terminal on which `vnvme top` draws its screen.
pub struct Terminal {
    signals: Signals,
    /// Socket that becomes readable when a signal has arrived.
    woken: UnixStream,
}

/// Input that `vnvme top` waits for: keys, or a signal that ends the program.
#[derive(Debug)]
pub enum Input {
    /// Pressed keys; none after the time limit, or when everything must be redrawn.
    Keys(Vec<Key>),
    /// Number of a signal that requests the end.
    End(i32),
}

impl Terminal {
    /// Switches the terminal to raw mode and the alternate screen.
    ///
    /// # Errors
    /// The error when standard input or output is not a terminal.
    pub fn open() -> io::Result<Self> {
        tcgetattr(io::stdin())?;
        tcgetattr(io::stdout())?;
        // This handler records a signal before the socket is written to.
        let signals = Signals::new(SIGNALS)?;
        let (woken, writer) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        for signal in SIGNALS {
            pipe::register(signal, writer.try_clone()?)?;
        }
        let terminal = Self { signals, woken };
        static HOOK: Once = Once::new();
        // The message of a panic is printed on the normal screen.
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                leave();
                before(panic);
            }));
        });
        enter()?;
        Ok(terminal)
    }

    /// Returns the number of columns and lines of the terminal.
    pub fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (size.ws_col.into(), size.ws_row.into())
            }
            _ => SIZE,
        }
    }

    /// Draws all lines, and clears the rest of the screen.
    ///
    /// # Errors
    /// The terminal is closed.
    pub fn draw(&self, lines: &[Line]) -> io::Result<()> {
        let mut text = String::from("\x1b[H");
        for (i, line) in lines.iter().enumerate() {
            if i > 0 {
                text.push_str("\r\n");
            }
            if line.cursor {
                text.push_str(&format!("\x1b[7m{}\x1b[0m", line.text))
            } else {
                text.push_str(&line.text)
            }
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        write(&text)
    }

    /// Waits for input until a time, and returns the first.
    ///
    /// # Errors
    /// The terminal is closed.
    pub fn wait(&mut self, until: Instant) -> io::Result<Input> {
        let stdin = io::stdin();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()) as _,
            };
            let mut fds = [
                PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return Ok(Input::Keys(Vec::new())),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            let [input, woken] = fds.map(|fd| !fd.revents().is_empty());
            if woken {
                return self.signalled();
            }
            if !input {
                continue;
            }
            let mut bytes = [0; 64];
            let read = rustix::io::read(&stdin, &mut bytes)?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let keys = decode(bytes.get(..read).unwrap_or_default());
            if !keys.is_empty() {
                return Ok(Input::Keys(keys));
            }
        }
    }

    fn signalled(&mut self) -> io::Result<Input> {
        let mut bytes = [0; 64];
        // A signal that arrives after this read wakes the program again.
        while self.woken.read(&mut bytes).is_ok_and(|read| read > 0) {}
        for signal in self.signals.pending() {
            match signal {
                SIGWINCH => {}
                SIGTSTP => {
                    leave();
                    emulate_default_handler(signal)?;
                    enter()?;
                }
                signal => return Ok(Input::End(signal)),
            }
        }
        Ok(Input::Keys(Vec::new()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        leave();
    }
}

/// Switches to raw mode and the alternate screen.
fn enter() -> io::Result<()> {
    let before = tcgetattr(io::stdin())?;
    let mut raw = before.clone();
    raw.make_raw();
    *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
    tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
    write(ENTER)
}

/// Restores the earlier settings of the terminal, once.
fn leave() {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = taken {
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Decodes the bytes that a terminal sends for keys; unknown sequences are ignored.
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
    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use std::fs::File;
    use std::process::Command;

    /// Not a test itself: the next test runs this function in a terminal.
    #[test]
    #[ignore = "a process that another test starts: cargo test -p vnvme terminal"]
    fn child_panics_in_terminal() {
        let _terminal = Terminal::open().unwrap();
        panic!("something went wrong");
    }

    #[test]
    fn panic_restores_terminal_before_message() {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let shell = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        let before = tcgetattr(&shell).unwrap();
        let end = || File::from(shell.try_clone().unwrap());
        let test = "top::terminal::tests::child_panics_in_terminal";
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .status()
            .unwrap();
        assert!(!status.success());
        let after = tcgetattr(&shell).unwrap();
        assert_eq!(after.local_modes, before.local_modes);
        assert_eq!(after.output_modes, before.output_modes);
        // Reading from the terminal fails when no process has it open.
        drop(shell);
        let mut bytes = Vec::new();
        let _ = File::from(terminal).read_to_end(&mut bytes);
        let shown = String::from_utf8_lossy(&bytes);
        let (_, stays) = shown.rsplit_once(LEAVE).expect(&shown);
        assert!(stays.contains("something went wrong"), "{shown:?}");
        assert_eq!(shown.matches(ENTER).count(), 1, "{shown:?}");
    }

    #[test]
    fn terminal_keys_are_decoded() {
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
