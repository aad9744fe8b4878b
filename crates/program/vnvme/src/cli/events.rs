//! `vnvme events`.

use super::target::DaemonTarget;
use anyhow::Result;
use clap::Args;
use control::Received;
use control::api::Event;
use output::{OutputError, outln};
use std::ops::ControlFlow;

/// Options of `vnvme events`.
#[derive(Args)]
pub struct EventsArgs {
    #[command(flatten)]
    target: DaemonTarget,
}

impl EventsArgs {
    /// Prints events until the serving process or this one ends.
    pub fn run(self) -> Result<()> {
        let is_json = self.target.is_json();
        let mut printed = Ok(());
        let each = |received| {
            printed = print(&received, is_json);
            match printed {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        };
        self.target.client()?.events(|| {}, each)?;
        Ok(printed?)
    }
}

fn print(received: &Received, is_json: bool) -> Result<(), OutputError> {
    match received {
        // Each event is one line, so that a program can read the stream.
        Received::Event(event) if is_json => {
            outln!("{}", serde_json::to_string(event).unwrap_or_default());
        }
        Received::Lost(lost) if is_json => outln!("{{\"lost\":{lost}}}"),
        Received::Event(event) => outln!("{}", line(event)),
        Received::Lost(lost) => outln!("{lost} events were lost: this client was too slow"),
    }
    Ok(())
}

/// Formats an event for people.
fn line(event: &Event) -> String {
    let seconds = event.time_ms / 1000;
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    let mut line = format!(
        "{hours:02}:{minutes:02}:{:02}.{:03}Z  {:<8}  {}",
        seconds % 60,
        event.time_ms % 1000,
        event.kind.name(),
        event.disk
    );
    if let Some(nsid) = event.nsid {
        line += &format!("  namespace {nsid}");
    }
    if let Some(message) = &event.message {
        line += "  ";
        line += message;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::api::EventKind;

    #[test]
    fn event_prints_as_line() {
        let event = Event {
            sequence: 1,
            time_ms: 1_700_000_000_123,
            kind: EventKind::Resized,
            disk: "vm0".into(),
            nsid: Some(2),
            message: Some("20 GiB".into()),
        };
        assert_eq!(
            line(&event),
            "22:13:20.123Z  resized   vm0  namespace 2  20 GiB"
        );
    }
}
