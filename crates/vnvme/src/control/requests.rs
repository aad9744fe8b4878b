//! What a request comes to.

use super::{Reply, Request};
use crate::devices::DeviceChange;
use crate::registry::Registry;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// What is to be done about a request.
pub(super) enum Handled {
    /// It is answered.
    Answered(Reply),
    /// A device takes its time: a thread of its own is to do it.
    Device(DeviceChange),
}

/// Handles a line that a client has sent.
pub(super) fn handle(line: &[u8], registry: &Registry) -> Handled {
    let request = match serde_json::from_slice::<Request>(line) {
        Ok(request) => request,
        Err(error) => return Handled::Answered(Reply::Error(format!("no request: {error}"))),
    };
    let arguments = request.arguments;
    let answer = match &*request.method {
        "stats" => Ok(Reply::Stats(Box::new(registry.snapshot()))),
        "limits" => read(arguments).and_then(|change| {
            let limits = registry.limits.change(&change)?;
            Ok(Reply::Limits(limits))
        }),
        "path" => read(arguments).and_then(|change| {
            let paths = registry.paths.change(&change)?;
            Ok(Reply::Paths(paths))
        }),
        "device" => match read(arguments) {
            Ok(change) => return Handled::Device(change),
            Err(error) => Err(error),
        },
        method => Err(format!(
            "unknown method \"{method}\"; known: stats, limits, path, device"
        )),
    };
    Handled::Answered(answer.unwrap_or_else(Reply::Error))
}

/// Does what a device is to do; returns when it is done.
pub(super) fn change_device(registry: &Registry, change: &DeviceChange) -> Reply {
    match registry.devices.change(change) {
        Ok(status) => Reply::Device(status),
        Err(error) => Reply::Error(error),
    }
}

fn read<T: DeserializeOwned>(arguments: Map<String, Value>) -> Result<T, String> {
    serde_json::from_value(Value::Object(arguments)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use controller::ControllerStats;
    use std::path::Path;
    use std::sync::Arc;

    fn ask(registry: &Registry, request: &[u8]) -> Reply {
        match handle(request, registry) {
            Handled::Answered(reply) => reply,
            Handled::Device(change) => change_device(registry, &change),
        }
    }

    #[test]
    fn answers_stats_and_explains_the_rest() {
        let registry = Registry::default();
        let stats = Arc::new(ControllerStats::new(2, 1));
        registry.enter(Path::new("/tmp/vm0.sock"), stats.clone(), Arc::default());
        if let Some(queue) = stats.queues.get(1) {
            queue.commands.add(7);
            queue.mmio_doorbells.add(2);
        }
        let Reply::Stats(stats) = ask(&registry, b"{\"method\":\"stats\"}") else {
            panic!("no counters");
        };
        assert_eq!(stats.controllers.len(), 1);
        let queues = &stats.controllers[0].queues;
        assert_eq!(queues.len(), 1, "unused queues are left out");
        assert_eq!(
            (queues[0].qid, queues[0].commands, queues[0].mmio_doorbells),
            (1, 7, 2)
        );
        for (request, word) in [
            (&b"{\"method\":\"dance\"}"[..], "dance"),
            (b"what?", "no request"),
            (b"", "no request"),
            (&[b'x'; 4096], "no request"),
            (b"{\"method\":\"device\"}", "device"),
            (
                b"{\"method\":\"device\",\"device\":\"a\",\"action\":\"resume\"}",
                "no device",
            ),
        ] {
            match ask(&registry, request) {
                Reply::Error(why) => assert!(why.contains(word), "{why}"),
                _ => panic!("{word}: it was answered"),
            }
        }
    }
}
