//! Latencies over more than one interval, for disks with few commands. Only some commands are
//! timed, so a disk with little load would have no latencies in most intervals.

use super::rates::{ByKind, Rates};
use metrics::Distribution;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Minimum number of samples from which a 99th percentile is computed.
const MIN_TIMES: u64 = 100;
/// Maximum age of latencies that are included in a distribution.
const MAX_AGE: Duration = Duration::from_secs(60);

/// Distribution of latencies, which may cover more than the last interval.
#[derive(Clone, Debug, Default)]
pub struct RecentTimes {
    pub times: Distribution,
    pub is_longer: bool,
}

/// Latencies of the latest intervals, for disks with few commands.
#[derive(Debug, Default)]
pub struct Recent {
    /// Latencies by disk name: of the whole disk, and of each of its namespaces.
    disks: HashMap<String, (Window, HashMap<u32, ByKind<Window>>)>,
}

/// Latencies of a disk or kind of command in the latest intervals.
#[derive(Debug, Default)]
struct Window(VecDeque<Slot>);

#[derive(Debug)]
struct Slot {
    /// End of the interval in nanoseconds, by the daemon's monotonic clock.
    at_ns: u64,
    times: Distribution,
}

impl Window {
    /// Adds the latencies of an interval that ended now, and returns the latencies to show.
    fn enter(&mut self, at_ns: u64, times: &Distribution) -> RecentTimes {
        let slot = Slot {
            at_ns,
            times: times.clone(),
        };
        self.0.push_front(slot);
        let mut shown = RecentTimes::default();
        let mut wanted = 0;
        for (i, slot) in self.0.iter().enumerate() {
            let age = at_ns.checked_sub(slot.at_ns).map(Duration::from_nanos);
            // A time in the future belongs to a process that has ended.
            let is_past = age.is_none_or(|age| age > MAX_AGE);
            if is_past || shown.times.count() >= MIN_TIMES {
                break;
            }
            wanted = i + 1;
            shown.is_longer |= i > 0 && !slot.times.is_empty();
            shown.times.add(&slot.times);
        }
        self.0.truncate(wanted);
        shown
    }
}

impl Recent {
    /// Replaces the latencies of an interval by those of as many intervals as needed.
    pub fn widen(&mut self, rates: &mut Rates) {
        self.disks
            .retain(|name, _| rates.disks.iter().any(|disk| disk.name == *name));
        for disk in &mut rates.disks {
            let (whole, namespaces) = self.disks.entry(disk.name.clone()).or_default();
            disk.latency = whole.enter(rates.at_ns, &disk.latency.times);
            namespaces.retain(|nsid, _| disk.namespaces.iter().any(|ns| ns.nsid == *nsid));
            for namespace in &mut disk.namespaces {
                let windows = namespaces.entry(namespace.nsid).or_default();
                for (window, latency) in windows.iter_mut().zip(&mut namespace.latency) {
                    *latency = window.enter(rates.at_ns, &latency.times);
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)] // A test fails by a panic.
mod tests {
    use super::super::rates::{DiskRates, NamespaceRates};
    use super::*;

    fn times(value: u64, count: u64) -> Distribution {
        Distribution {
            steps: match count {
                0 => vec![],
                _ => vec![(value, count)],
            },
            sum: value * count,
        }
    }

    fn shown(window: &mut Window, second: u64, value: u64, count: u64) -> (u64, bool) {
        let shown = window.enter(second * 1_000_000_000, &times(value, count));
        (shown.times.count(), shown.is_longer)
    }

    #[test]
    fn window_keeps_needed_intervals_only() {
        let mut window = Window::default();
        assert_eq!(shown(&mut window, 1, 5, 0), (0, false));
        assert_eq!(shown(&mut window, 2, 5, 40), (40, false));
        assert_eq!(shown(&mut window, 3, 5, 40), (80, true));
        assert_eq!(shown(&mut window, 4, 5, 40), (120, true));
        assert_eq!(shown(&mut window, 5, 5, 40), (120, true), "not four");
        assert_eq!(shown(&mut window, 6, 5, 500), (500, false));
        assert_eq!(window.0.len(), 1);
        assert_eq!(shown(&mut window, 7, 5, 0), (500, true));
        assert_eq!(shown(&mut window, 66, 5, 0), (500, true));
        assert_eq!(shown(&mut window, 67, 5, 0), (0, false), "too old");
        assert_eq!(shown(&mut window, 68, 5, 7), (7, false));
        assert_eq!(shown(&mut window, 1, 5, 3), (3, false), "it began again");
    }

    #[test]
    fn window_is_separate_per_disk_and_kind() {
        let rates = |second: u64, names: &[&str]| Rates {
            at_ns: second * 1_000_000_000,
            disks: names
                .iter()
                .map(|name| DiskRates {
                    name: (*name).to_owned(),
                    latency: RecentTimes {
                        times: times(7, 3),
                        is_longer: false,
                    },
                    namespaces: vec![NamespaceRates {
                        nsid: 1,
                        ..NamespaceRates::default()
                    }],
                    ..DiskRates::default()
                })
                .collect(),
            ..Rates::default()
        };
        let mut recent = Recent::default();
        recent.widen(&mut rates(1, &["a", "b"]));
        let mut second = rates(2, &["a"]);
        second.disks[0].namespaces[0].latency[1].times = times(9, 2);
        recent.widen(&mut second);
        let disk = &second.disks[0];
        assert_eq!(disk.latency.times, times(7, 6));
        assert!(disk.latency.is_longer);
        let counts = disk.namespaces[0].latency.each_ref();
        assert_eq!(counts.map(|kind| kind.times.count()), [0, 2, 0, 0]);
        assert!(!disk.namespaces[0].latency[1].is_longer);
        // A disk that disappeared starts without latencies.
        let mut third = rates(3, &["a", "b"]);
        recent.widen(&mut third);
        assert_eq!(third.disks[1].latency.times, times(7, 3));
    }
}
