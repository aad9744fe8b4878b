//! Table of all metrics: name, type, unit and meaning.

/// Prometheus metric types in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Value that only increases, and restarts at 0 with a new process.
    Counter,
    /// Value that increases and decreases.
    Gauge,
    /// Numbers of values up to each of several bounds.
    Histogram,
}

impl Type {
    /// Returns the name of the type in the text format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Definition of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name by Prometheus' conventions: base units, `_total` for counters.
    pub name: &'static str,
    /// Type of the metric.
    pub kind: Type,
    /// Unit of the values.
    pub unit: &'static str,
    /// Names of the labels that its samples carry.
    pub labels: &'static [&'static str],
    /// Meaning of the metric, in one or two sentences.
    pub help: &'static str,
}

/// Defines the metrics, each as a constant, and the table of all of them.
macro_rules! metrics {
    ($($constant:ident = $name:literal, $kind:ident, $unit:literal, [$($label:literal),*], $help:literal;)*) => {
        $(pub(crate) const $constant: Metric = Metric {
            name: $name,
            kind: Type::$kind,
            unit: $unit,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// All metrics, in the order in which they are exposed.
        pub const METRICS: &[Metric] = &[$($constant),*];
    };
}

metrics! {
    BUILD_INFO = "vnvme_build_info", Gauge, "1", ["version"],
        "The program's version.";

    DISK_INFO = "vnvme_disk_info", Gauge, "1", ["disk", "kind", "address"],
        "A disk that is served: its kind (controller, vhost-user-blk, ublk), and its socket or \
         block device.";
    DISK_UNSERVED = "vnvme_disk_unserved", Gauge, "1", ["disk"],
        "Whether the disk is unavailable; vnvme list shows the reason.";
    DISK_CONNECTED = "vnvme_disk_connected", Gauge, "0 or 1", ["disk"],
        "Whether a client is attached to the disk; a ublk disk is attached to the kernel.";
    DISK_CONNECTIONS = "vnvme_disk_connections_total", Counter, "connections", ["disk"],
        "Clients that the disk's socket has accepted.";
    DISK_RESETS = "vnvme_disk_resets_total", Counter, "resets", ["disk"],
        "Controller-level resets of an NVMe disk.";
    DISK_MIGRATIONS = "vnvme_disk_queue_migrations_total", Counter, "migrations", ["disk"],
        "Queues of an NVMe disk that went from one worker to another.";

    OPERATIONS = "vnvme_operations_total", Counter, "operations", ["disk", "namespace", "op"],
        "Commands that ended, well or not, by operation: read (Compare, too), write, flush, other. \
         What is refused before it begins counts as an error only.";
    BYTES = "vnvme_bytes_total", Counter, "bytes", ["disk", "namespace", "op"],
        "Bytes that the host has read and written.";
    ERRORS = "vnvme_errors_total", Counter, "commands", ["disk", "namespace", "kind"],
        "Commands that failed, by kind: media, no_space, out_of_range, read_only, memory (of the \
         host), aborted, \
         interrupted, miscompare, invalid, path, internal. Namespace 0: they named none that there is.";
    LATENCY_SAMPLED = "vnvme_command_latency_sampled_seconds", Histogram, "seconds",
        ["disk", "namespace", "op"],
        "Time of reads and writes from fetching a command to posting its completion. A sample: one of 61 commands of \
         each queue is timed. Values are at most a sixteenth too large.";
    LATENCY = "vnvme_command_latency_seconds", Histogram, "seconds", ["disk", "namespace", "op"],
        "Time of flushes and other commands from fetching a command to posting its completion; all of them. Values are \
         at most a sixteenth too large.";
    DEPTH_SAMPLED = "vnvme_queue_depth_sampled", Histogram, "commands", ["disk", "namespace"],
        "Commands of a queue that were in flight when one was fetched that is timed (one of 61).";

    IN_FLIGHT = "vnvme_commands_in_flight", Gauge, "commands", ["disk"],
        "I/O commands fetched and not completed, at the moment of the scrape.";
    COMMANDS = "vnvme_commands_total", Counter, "commands", ["disk"],
        "Commands fetched from the disk's queues, admin commands included.";
    MMIO = "vnvme_mmio_doorbells_total", Counter, "doorbells", ["disk"],
        "Doorbells that came as register writes or kicks: an exit of the guest each. Divided by \
         vnvme_commands_total: MMIO per I/O.";
    SHADOW = "vnvme_shadow_doorbells_total", Counter, "doorbells", ["disk"],
        "Times that an NVMe disk found a new submission queue tail in memory.";
    ARMS = "vnvme_arms_total", Counter, "times", ["disk"],
        "Times that a queue was armed (EventIdx, avail_event) before its worker slept.";
    INTERRUPTS = "vnvme_interrupts_total", Counter, "interrupts", ["disk"],
        "Interrupts sent to the disk's guest.";

    LIMIT_IOPS = "vnvme_limit_operations_per_second", Gauge, "operations per second",
        ["volume", "op"],
        "Limits of a volume that has some; op is all, read or write, and 0 is no limit.";
    LIMIT_BPS = "vnvme_limit_bytes_per_second", Gauge, "bytes per second", ["volume", "op"],
        "Limits of a volume that has some; op is all, read or write, and 0 is no limit.";
    THROTTLED = "vnvme_throttled_seconds_total", Counter, "seconds", ["volume"],
        "Time for which requests have waited for the limits, added up over all that have waited.";
    THROTTLED_REQUESTS = "vnvme_throttled_requests_total", Counter, "requests", ["volume"],
        "Requests that had to wait for the limits.";
    WEIGHT = "vnvme_share_weight", Gauge, "1", ["volume"],
        "Weight of a volume among the slices of its device.";

    VOLUME_ERRORS = "vnvme_volume_errors_total", Counter, "requests", ["volume", "op"],
        "Requests to a volume that failed, each time that they did; op is read or write. What was \
         repeated and succeeded then is among them, and its guest was told nothing.";
    VOLUME_NO_SPACE = "vnvme_volume_no_space_total", Counter, "requests", ["volume"],
        "Of these, requests that failed for want of space.";
    VOLUME_REPEATED = "vnvme_volume_repeated_total", Counter, "requests", ["volume"],
        "Failed requests that were begun once more.";
    VOLUME_STOPPED = "vnvme_volume_stopped", Gauge, "0 or 1", ["volume"],
        "Whether requests to a volume wait for vnvme resume, because one has failed.";

    PATH_DIRECT = "vnvme_path_direct", Gauge, "0 or 1", ["disk", "namespace"],
        "Whether commands of a namespace that has a direct path to a device take it now.";
    PATH_COMMANDS = "vnvme_path_commands_total", Counter, "commands", ["disk", "namespace"],
        "Commands that went to a device by the direct path.";
    PATH_BOUNCED = "vnvme_path_bounced_total", Counter, "commands", ["disk", "namespace"],
        "Of these, commands whose data was copied.";
    DEVICE_UP = "vnvme_device_up", Gauge, "0 or 1", ["device", "state"],
        "Whether a device below is at work; its state is live, connecting (a server that is waited for), suspended or gone.";
    DEVICE_RESETS = "vnvme_device_resets_total", Counter, "resets", ["device"],
        "Resets of a device below; connections to a server that were lost.";

    WORKER_BUSY = "vnvme_worker_busy_seconds_total", Counter, "seconds", ["worker"],
        "Time in which a worker had work.";
    WORKER_POLLING = "vnvme_worker_polling_seconds_total", Counter, "seconds", ["worker"],
        "Time in which a worker polled without finding anything.";
    WORKER_ASLEEP = "vnvme_worker_asleep_seconds_total", Counter, "seconds", ["worker"],
        "Time in which a worker slept.";
    WORKER_CPU = "vnvme_worker_cpu_seconds_total", Counter, "seconds", ["worker"],
        "Processor time of a worker's thread.";
    WORKER_WAKE_UPS = "vnvme_worker_wake_ups_total", Counter, "wake-ups", ["worker"],
        "Sleeps of a worker that have ended.";
    WORKER_STALLS = "vnvme_worker_stalls_total", Counter, "stalls", ["worker"],
        "Times that a worker made no round for a second or longer.";
    RING_REQUESTS = "vnvme_ring_requests_total", Counter, "requests", ["worker"],
        "Requests to files and block devices that went through a worker's io_uring.";
    RING_CALLS = "vnvme_ring_system_calls_total", Counter, "system calls", ["worker"],
        "System calls of a worker's io_uring.";

    PROCESS_CPU = "process_cpu_seconds_total", Counter, "seconds", [],
        "Processor time of the process, user and system.";
    PROCESS_RSS = "process_resident_memory_bytes", Gauge, "bytes", [],
        "Resident memory of the process, guests' memory that it maps included.";
    PROCESS_ANONYMOUS = "vnvme_process_anonymous_memory_bytes", Gauge, "bytes", [],
        "Resident memory of the process that is no file's and no guest's.";
    PROCESS_VM = "process_virtual_memory_bytes", Gauge, "bytes", [],
        "Virtual memory of the process, guests' memory that it maps included.";
    PROCESS_THREADS = "process_threads", Gauge, "threads", [],
        "Threads of the process.";
    PROCESS_START = "process_start_time_seconds", Gauge, "seconds", [],
        "When the process began, since 1970-01-01 UTC.";
    PROCESS_RESTARTS = "vnvme_process_restarts_total", Counter, "processes", [],
        "Processes that served before this one under the same keeper, where there is one.";
    PROCESS_PAUSE = "vnvme_process_last_pause_seconds", Gauge, "seconds", [],
        "How long nobody was served before this process took the place of the one before.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_follow_the_conventions_and_are_different() {
        let mut seen = BTreeSet::new();
        for metric in METRICS {
            let name = metric.name;
            assert!(seen.insert(name), "{name}");
            let known = |c: char| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit();
            assert!(name.chars().all(known), "{name}");
            assert!(name.starts_with("vnvme_") || name.starts_with("process_"));
            assert_eq!(
                name.ends_with("_total"),
                metric.kind == Type::Counter,
                "{name}"
            );
            assert!(metric.help.ends_with('.') && !metric.help.contains('\n'));
            assert!(!metric.help.contains("  "), "{name}");
            assert_eq!(
                metric.unit == "seconds",
                name.contains("_seconds"),
                "{name}: {}",
                metric.unit
            );
            if name.contains("sampled") {
                assert!(metric.help.contains("one of 61"), "{name}");
                assert_eq!(probes::TIMED_EVERY, 61);
            }
        }
    }
}
