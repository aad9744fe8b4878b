//! The harness's end of the guest's control port: requests to `assets/init.sh`, framed so that a
//! script's output may hold any bytes.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sync::Unpoisoned;

/// Answer of the guest to one request.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Exit status of the script, as a shell reports it.
    pub status: i32,
    /// Output of the script, or the file's content.
    pub data: Vec<u8>,
}

/// A connected control port.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    buffer: Vec<u8>,
    requests: u64,
}

/// The largest answer that is taken from a guest, so that a broken one
/// cannot fill the host's memory.
const LARGEST_ANSWER: usize = 1 << 30;

impl Channel {
    /// Takes over a connected stream.
    pub fn new(stream: UnixStream) -> Channel {
        Channel {
            stream,
            buffer: Vec::new(),
            requests: 0,
        }
    }

    /// Waits for the line that a booted guest sends; returns the boot's id and the guest's uptime
    /// in seconds. An incomplete line of an earlier boot on the port is skipped.
    pub fn ready(&mut self, deadline: Instant) -> Result<(String, f32)> {
        loop {
            let line = self.line(deadline)?;
            let Some(at) = line.find("READY ") else {
                continue;
            };
            let mut words = line.get(at + 6..).unwrap_or_default().split_whitespace();
            let boot = words.next().context("READY without a boot id")?;
            let uptime = words.next().and_then(|w| w.parse().ok()).unwrap_or(0.0);
            return Ok((boot.to_string(), uptime));
        }
    }

    /// Runs a script in the guest, killed there after `limit`.
    pub fn run(&mut self, script: &str, limit: Duration) -> Result<Reply> {
        let head = format!("{} {}", script.len(), limit.as_secs().max(1));
        // The guest's own clock ends the script; the host waits longer, for an answer
        // that takes its time to come.
        self.request("RUN", &head, script.as_bytes(), limit + EXTRA_TIMEOUT)
    }

    /// Writes a file in the guest, with permission bits `mode`.
    pub fn put(&mut self, path: &str, mode: u32, data: &[u8], limit: Duration) -> Result<Reply> {
        self.request(
            "PUT",
            &format!("{} {mode:o} {path}", data.len()),
            data,
            limit,
        )
    }

    /// Reads a file of the guest.
    pub fn get(&mut self, path: &str, limit: Duration) -> Result<Reply> {
        self.request("GET", path, &[], limit)
    }

    /// Sends a word that is not answered.
    pub fn send(&mut self, verb: &str) -> Result<()> {
        self.write(format!("{verb}\n").as_bytes(), Duration::from_secs(10))
    }

    fn request(&mut self, verb: &str, head: &str, body: &[u8], limit: Duration) -> Result<Reply> {
        self.requests += 1;
        let id = self.requests;
        let deadline = Instant::now() + limit;
        self.write(format!("{verb} {id} {head}\n").as_bytes(), limit)?;
        self.write(body, limit)?;
        let line = self.line(deadline)?;
        if line.starts_with("READY") {
            bail!("the guest rebooted by itself");
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let &["DONE", answered, status, size] = words.as_slice() else {
            bail!("the guest answered {line:?} to request {id}");
        };
        if answered.parse() != Ok(id) {
            bail!("the guest answered request {answered} instead of {id}");
        }
        let (status, size) = (status.parse()?, size.parse()?);
        if size > LARGEST_ANSWER {
            bail!("an answer of {size} bytes is too long");
        }
        let data = self.take(size, deadline)?;
        Ok(Reply { status, data })
    }

    fn write(&mut self, bytes: &[u8], limit: Duration) -> Result<()> {
        self.stream.set_write_timeout(Some(limit))?;
        self.stream
            .write_all(bytes)
            .context("writing to the guest's control port")
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_string());
            }
            self.fill(deadline)?;
        }
    }

    fn take(&mut self, len: usize, deadline: Instant) -> Result<Vec<u8>> {
        while self.buffer.len() < len {
            self.fill(deadline)?;
        }
        Ok(self.buffer.drain(..len).collect())
    }

    fn fill(&mut self, deadline: Instant) -> Result<()> {
        let mut chunk = [0; 65536];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the guest did not answer in time");
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("QEMU closed the control port"),
                Ok(n) => {
                    self.buffer
                        .extend_from_slice(chunk.get(..n).unwrap_or(&chunk));
                    return Ok(());
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("reading from the guest's control port"),
            }
        }
    }
}

/// Additional time for which the host waits beyond the guest's limit.
const EXTRA_TIMEOUT: Duration = Duration::from_secs(15);

/// Lines that scripts in the guest send to the host while they run (`echo word >&4`).
#[derive(Clone, Debug, Default)]
pub struct Events {
    shared: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Events {
    /// Collects lines from a stream until it closes.
    pub fn collect(stream: UnixStream) -> Result<Events> {
        let events = Events::default();
        let collector = events.clone();
        std::thread::Builder::new()
            .name("events".into())
            .spawn(move || {
                use std::io::BufRead;
                let lines = std::io::BufReader::new(stream).lines();
                for line in lines.map_while(std::io::Result::ok) {
                    let (lock, changed) = &*collector.shared;
                    lock.lock().unpoisoned().push(line);
                    changed.notify_all();
                }
            })?;
        Ok(events)
    }

    /// All lines so far.
    pub fn all(&self) -> Vec<String> {
        let (lock, _) = &*self.shared;
        lock.lock().unpoisoned().clone()
    }

    /// Waits until `enough` accepts all lines so far; returns them.
    pub fn wait(&self, limit: Duration, enough: impl Fn(&[String]) -> bool) -> Result<Vec<String>> {
        let deadline = Instant::now() + limit;
        let (lock, changed) = &*self.shared;
        let mut lines = lock.lock().unpoisoned();
        loop {
            if enough(&lines) {
                return Ok(lines.clone());
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                bail!(
                    "the guest sent {} events, not the expected ones: {:?}",
                    lines.len(),
                    lines.last()
                );
            };
            lines = changed.wait_timeout(lines, left).unpoisoned().0;
        }
    }
}

/// Accepts one connection within a time; `alive` is asked whether waiting still makes sense.
pub fn accept(
    listener: &UnixListener,
    deadline: Instant,
    alive: impl Fn() -> bool,
) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e).context("accepting QEMU's connection"),
        }
        if !alive() {
            bail!("QEMU ended before it connected");
        }
        if Instant::now() >= deadline {
            bail!("QEMU did not connect in time");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a guest's side that sends these bytes.
    fn guest(says: &'static [u8]) -> Result<Channel> {
        let (ours, mut theirs) = UnixStream::pair()?;
        std::thread::spawn(move || {
            let _ = theirs.write_all(says);
            let mut sink = Vec::new();
            let _ = theirs.read_to_end(&mut sink);
        });
        Ok(Channel::new(ours))
    }

    #[test]
    fn command_output_may_hold_any_bytes() -> Result<()> {
        let mut channel = guest(b"junk\nREADY abc 2.5\nDONE 1 3 7\n\nDONE \xffDONE 2 0 0\n")?;
        let soon = Instant::now() + Duration::from_secs(10);
        assert_eq!(channel.ready(soon)?, ("abc".to_string(), 2.5));
        let reply = channel.run("x", Duration::from_secs(5))?;
        assert_eq!((reply.status, reply.data), (3, b"\nDONE \xff".to_vec()));
        let reply = channel.run("y", Duration::from_secs(5))?;
        assert_eq!((reply.status, reply.data.len()), (0, 0));
        Ok(())
    }

    #[test]
    fn stale_answer_and_reboot_are_errors() -> Result<()> {
        let mut channel = guest(b"DONE 7 0 0\n")?;
        let e = channel.run("x", Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("instead of 1"), "{e}");
        let mut channel = guest(b"READY b 1\n")?;
        let e = channel.run("x", Duration::from_secs(5)).unwrap_err();
        assert!(e.to_string().contains("rebooted"), "{e}");
        Ok(())
    }
}
