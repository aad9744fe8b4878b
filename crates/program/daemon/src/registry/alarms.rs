//! Events that are found by comparing counters once a second, because workers send no events about
//! commands. Counters are not read while there is no listener.

use control::EventSender;
use control::api::{EventKind, Stats};
use std::collections::{HashMap, HashSet};

/// Counters of a disk when they were last compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DiskCounters {
    errors: u64,
    /// Whether a front-end is attached to the vhost-user-blk export. Other disks report connections
    /// themselves.
    connected: bool,
}

/// Counters of a volume's I/O limits when they were last compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LimitCounters {
    delayed: u64,
    /// Whether the limits delayed requests between the last two comparisons.
    waits: bool,
}

/// Detector of errors, delays and stopped volumes, which compares counters and sends events.
#[derive(Debug, Default)]
pub struct Alarms {
    disks: HashMap<String, DiskCounters>,
    volumes: HashMap<(String, u32, String), LimitCounters>,
    /// Disk, NSID and name of each volume that is stopped after an error.
    stopped: HashSet<(String, u32, String)>,
}

impl Alarms {
    /// Compares the counters with those of the last check, and sends events about changes of disks
    /// that existed then.
    pub fn look(&mut self, stats: &Stats, events: &EventSender) {
        self.look_at_disks(stats, events);
        self.look_at_limits(stats, events);
        self.look_at_stops(stats, events);
    }

    /// Sends events about stopped volumes. Includes those that stopped before the first listener,
    /// since they still wait for an operator.
    fn look_at_stops(&mut self, stats: &Stats, events: &EventSender) {
        let stopped = stats.on_error.iter().filter(|one| one.stopped);
        let mut now = HashSet::new();
        for one in stopped {
            let name = (one.disk.clone(), one.nsid, one.volume.clone());
            if !self.stopped.contains(&name) {
                let nsid = Some(one.nsid).filter(|nsid| *nsid > 0);
                let why = one.last_error.as_deref().unwrap_or("a request has failed");
                let message = format!("{}: {why}; requests wait for vnvme resume", one.volume);
                events.send(EventKind::Stopped, &one.disk, nsid, Some(message));
            }
            now.insert(name);
        }
        for (disk, nsid, volume) in self.stopped.difference(&now) {
            let nsid = Some(*nsid).filter(|nsid| *nsid > 0);
            events.send(EventKind::Resumed, disk, nsid, Some(volume.clone()));
        }
        self.stopped = now;
    }

    fn look_at_disks(&mut self, stats: &Stats, events: &EventSender) {
        let controllers = stats.controllers.iter().map(|one| {
            let seen = DiskCounters {
                errors: one.errors,
                connected: false,
            };
            (&one.name, seen)
        });
        let exports = stats.vhost_user_blk.iter().map(|one| {
            let seen = DiskCounters {
                errors: one.queues.iter().map(|queue| queue.errors).sum(),
                connected: one.connected,
            };
            (&one.name, seen)
        });
        let ublk = stats.ublk.iter().map(|one| {
            let seen = DiskCounters {
                errors: one.queues.iter().map(|queue| queue.errors).sum(),
                connected: false,
            };
            (&one.name, seen)
        });
        let mut disks = HashMap::new();
        for (name, seen) in controllers.chain(exports).chain(ublk) {
            disks.insert(name.clone(), seen);
            let Some(before) = self.disks.get(name) else {
                continue;
            };
            let errors = seen.errors.saturating_sub(before.errors);
            if errors > 0 {
                let message = Some(format!("commands that failed: {errors}"));
                events.send(EventKind::Error, name, None, message);
            }
            match (before.connected, seen.connected) {
                (false, true) => events.send(EventKind::Attached, name, None, None),
                (true, false) => events.send(EventKind::Detached, name, None, None),
                _ => {}
            }
        }
        self.disks = disks;
    }

    fn look_at_limits(&mut self, stats: &Stats, events: &EventSender) {
        let mut volumes = HashMap::new();
        for one in &stats.volumes {
            let name = (one.disk.clone(), one.nsid, one.volume.clone());
            let before = self.volumes.get(&name);
            let waits = before.is_some_and(|before| one.delayed > before.delayed);
            if waits && before.is_some_and(|before| !before.waits) {
                let nsid = Some(one.nsid).filter(|nsid| *nsid > 0);
                let message = format!("requests to {} wait for its limits", one.volume);
                events.send(EventKind::Limited, &one.disk, nsid, Some(message));
            }
            let delayed = one.delayed;
            volumes.insert(name, LimitCounters { delayed, waits });
        }
        self.volumes = volumes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::Received;
    use control::api::{ControllerCounters, VhostBlkCounters, VolumeErrors, VolumeLimits};

    #[test]
    fn stopped_and_resumed_disk_sends_one_event_each() {
        let events = EventSender::new();
        let mut listener = events.receiver();
        let mut alarms = Alarms::default();
        let mut look = |stopped| {
            let stats = Stats {
                on_error: vec![VolumeErrors {
                    disk: "a".into(),
                    nsid: 1,
                    stopped,
                    ..VolumeErrors::default()
                }],
                ..Stats::default()
            };
            alarms.look(&stats, &events);
            match listener.try_next() {
                Some(Received::Event(event)) => Some(event.kind),
                _ => None,
            }
        };
        assert_eq!(look(false), None);
        assert_eq!(look(true), Some(EventKind::Stopped));
        assert_eq!(look(true), None);
        assert_eq!(look(false), Some(EventKind::Resumed));
        assert_eq!(look(false), None);
    }

    fn stats(errors: u64, connected: bool, delayed: u64) -> Stats {
        Stats {
            controllers: vec![ControllerCounters {
                name: "a".into(),
                errors,
                ..ControllerCounters::default()
            }],
            vhost_user_blk: vec![VhostBlkCounters {
                name: "b".into(),
                connected,
                ..VhostBlkCounters::default()
            }],
            volumes: vec![VolumeLimits {
                disk: "a".into(),
                nsid: 2,
                delayed,
                ..VolumeLimits::default()
            }],
            ..Stats::default()
        }
    }

    #[test]
    fn changes_between_polls_send_one_event_each() {
        let events = EventSender::new();
        let mut listener = events.receiver();
        let mut alarms = Alarms::default();
        let mut look = |stats: Stats| {
            alarms.look(&stats, &events);
            let told = std::iter::from_fn(|| listener.try_next());
            let told = told.map(|received| match received {
                Received::Event(event) => (event.kind, event.disk),
                Received::Lost(_) => panic!("events are lost"),
            });
            told.collect::<Vec<_>>()
        };
        let nothing: Vec<(EventKind, String)> = Vec::new();
        let (a, b) = (|| "a".to_owned(), || "b".to_owned());
        assert_eq!(look(stats(7, false, 9)), nothing, "it was so before");
        assert_eq!(look(stats(7, false, 9)), nothing);
        assert_eq!(look(stats(9, false, 9)), [(EventKind::Error, a())]);
        assert_eq!(look(stats(9, true, 9)), [(EventKind::Attached, b())]);
        assert_eq!(look(stats(9, true, 12)), [(EventKind::Limited, a())]);
        assert_eq!(look(stats(9, true, 20)), nothing, "it goes on");
        assert_eq!(look(stats(9, true, 20)), nothing);
        let both = [(EventKind::Detached, b()), (EventKind::Limited, a())];
        assert_eq!(look(stats(9, false, 21)), both);
        // The disk was removed, and another disk has its name.
        assert_eq!(look(Stats::default()), nothing);
        assert_eq!(look(stats(50, true, 50)), nothing);
    }
}
