//! QEMU's machine protocol (QMP), as much as the harness needs: one command, one answer; events.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Bound for QEMU's answer to a command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A QMP session.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    events: Vec<Value>,
}

impl Qmp {
    /// Reads QEMU's greeting and leaves negotiation mode.
    pub fn open(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let writer = stream.try_clone()?;
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
            writer,
            events: Vec::new(),
        };
        let greeting = qmp.read()?;
        if greeting.get("QMP").is_none() {
            bail!("not a QMP greeting: {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and answers its `return`.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.writer
            .write_all(line.as_bytes())
            .with_context(|| format!("QMP {command}"))?;
        loop {
            let answer = self.read().with_context(|| format!("QMP {command}"))?;
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
            if let Some(error) = answer.get("error") {
                bail!("QMP {command}: {error}");
            }
            self.events.push(answer);
        }
    }

    /// Takes the events that arrived before the last answer.
    pub fn take_events(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.events)
    }

    /// Waits for an event that `wanted` accepts, and returns it. Events before it are dropped.
    pub fn wait_event(
        &mut self,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + limit;
        let mut early = self.take_events().into_iter();
        let found = loop {
            let event = match early.next() {
                Some(event) => event,
                None => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    // A timeout of zero is an error.
                    let left = left.max(Duration::from_millis(1));
                    self.writer.set_read_timeout(Some(left))?;
                    self.read().context("waiting for an event of QMP")?
                }
            };
            if wanted(&event) {
                break event;
            }
        };
        self.events = early.collect();
        self.writer.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(found)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("QEMU closed its QMP socket");
        }
        serde_json::from_str(&line).with_context(|| format!("QMP sent {line:?}"))
    }
}
