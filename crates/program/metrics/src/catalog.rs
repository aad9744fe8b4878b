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

        /// All metrics beside [`KIND_COUNTERS`], in the order in which they are exposed.
        pub(crate) const METRICS: &[Metric] = &[$($constant),*];
    };
}

/// Counters that disks of one kind have beside those of all disks.
#[derive(Clone, Copy, Debug)]
pub struct KindCounters {
    /// Name of the kind in configuration files.
    pub kind: &'static str,
    /// Name of each counter in the front-end, and its metric.
    pub rows: &'static [(&'static str, Metric)],
}

impl KindCounters {
    /// Returns whether the rows are those of the counters with these names, in the same order. The
    /// crate that reads the counters asserts it while it is compiled.
    pub const fn has_all(&self, names: &[&str]) -> bool {
        const fn is_same(one: &[u8], other: &[u8]) -> bool {
            match (one, other) {
                ([], []) => true,
                ([a, one @ ..], [b, other @ ..]) => *a == *b && is_same(one, other),
                _ => false,
            }
        }
        const fn are_same(rows: &[(&str, Metric)], names: &[&str]) -> bool {
            match (rows, names) {
                ([], []) => true,
                ([(row, _), rows @ ..], [name, names @ ..]) => {
                    is_same(row.as_bytes(), name.as_bytes()) && are_same(rows, names)
                }
                _ => false,
            }
        }
        are_same(self.rows, names)
    }
}

/// Defines the counters of kinds of disks: for each kind a constant, with a row for each counter of
/// its front-end.
macro_rules! kind_counters {
    ($($(#[$doc:meta])* $constant:ident = $kind:literal {
        $($counter:ident = $name:literal, $unit:literal, $help:literal;)*
    })*) => {
        $($(#[$doc])* pub const $constant: KindCounters = KindCounters {
            kind: $kind,
            rows: &[$((stringify!($counter), Metric {
                name: $name,
                kind: Type::Counter,
                unit: $unit,
                labels: &["disk"],
                help: $help,
            })),*],
        };)*

        /// Counters of all kinds of disks, which are exposed behind the other metrics.
        pub const KIND_COUNTERS: &[KindCounters] = &[$($constant),*];
    };
}

/// Returns all metrics, in the order in which they are exposed.
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    let rows = KIND_COUNTERS.iter().flat_map(|kind| kind.rows);
    METRICS.iter().chain(rows.map(|(_, metric)| metric))
}

kind_counters! {
    /// Counters of an NVMe/TCP subsystem, over all its hosts.
    NVME_TCP = "nvme-tcp" {
        associations = "vnvme_nvme_tcp_associations_total", "associations",
            "Associations that hosts have created with an NVMe/TCP subsystem.";
        connections = "vnvme_nvme_tcp_connections_total", "connections",
            "Connections that became a queue of an association.";
        refused = "vnvme_nvme_tcp_refused_total", "connections",
            "Connections that an NVMe/TCP subsystem has refused: of hosts that may not connect or did not \
             authenticate, for other subsystems, and beyond the limits.";
    }
}

/// Metric that only the output of `vnvme metrics --all` has.
pub const INSTANCE_UP: Metric = Metric {
    name: "vnvme_instance_up",
    kind: Type::Gauge,
    unit: "0 or 1",
    labels: &["instance"],
    help: "Whether an instance answered; only in the output of vnvme metrics --all, where each \
           sample has the label instance.",
};

metrics! {
    BUILD_INFO = "vnvme_build_info", Gauge, "1", ["version"],
        "The program's version.";

    DISK_INFO = "vnvme_disk_info", Gauge, "1", ["disk", "kind", "address"],
        "Kind (controller, vhost-user-blk, nvme-tcp, ublk) and address of a disk. A host of an NVMe/TCP \
         subsystem has a controller of its own, named SUBSYSTEM/NUMBER.";
    DISK_UNSERVED = "vnvme_disk_unserved", Gauge, "1", ["disk"],
        "Whether the disk is unavailable; vnvme list shows the reason.";
    DISK_CONNECTED = "vnvme_disk_connected", Gauge, "0 or 1", ["disk"],
        "Whether a client is attached to the disk; a ublk disk is attached to the kernel.";
    DISK_CONNECTIONS = "vnvme_disk_connections_total", Counter, "connections", ["disk"],
        "Clients accepted by the disk's socket.";
    DISK_RESETS = "vnvme_disk_resets_total", Counter, "resets", ["disk"],
        "Controller-level resets of an NVMe disk.";
    DISK_MIGRATIONS = "vnvme_disk_queue_migrations_total", Counter, "migrations", ["disk"],
        "Queue migrations of an NVMe disk between workers.";

    OPERATIONS = "vnvme_operations_total", Counter, "operations", ["disk", "namespace", "op"],
        "Commands that ended, with or without an error, by operation: read (including Compare), write, flush, other. \
         Commands refused before their start count only as errors.";
    BYTES = "vnvme_bytes_total", Counter, "bytes", ["disk", "namespace", "op"],
        "Bytes that the host has read and written.";
    ERRORS = "vnvme_errors_total", Counter, "commands", ["disk", "namespace", "kind"],
        "Commands that failed, by kind: media, no_space, out_of_range, read_only, memory (of the \
         host), aborted, interrupted, miscompare, invalid, path, internal. Namespace 0 has commands for \
         namespaces that do not exist.";
    LATENCY_SAMPLED = "vnvme_command_latency_sampled_seconds", Histogram, "seconds",
        ["disk", "namespace", "op"],
        "Time of reads and writes from fetching a command to posting its completion. A sample: one of 61 commands of \
         each queue is timed. Values are at most a sixteenth too large.";
    LATENCY = "vnvme_command_latency_seconds", Histogram, "seconds", ["disk", "namespace", "op"],
        "Time of flushes and other commands from fetching a command to posting its completion; all of them. Values are \
         at most a sixteenth too large.";
    DEPTH_SAMPLED = "vnvme_queue_depth_sampled", Histogram, "commands", ["disk", "namespace"],
        "Outstanding commands of a queue when a timed command (one of 61) was fetched.";

    IN_FLIGHT = "vnvme_commands_in_flight", Gauge, "commands", ["disk"],
        "I/O commands fetched and not completed, at the moment of the scrape.";
    COMMANDS = "vnvme_commands_total", Counter, "commands", ["disk"],
        "Commands fetched from the disk's queues, admin commands included.";
    MMIO = "vnvme_mmio_doorbells_total", Counter, "doorbells", ["disk"],
        "Doorbells received as register writes or kicks, each an exit of the guest. Divided by \
         vnvme_commands_total: MMIO per I/O.";
    SHADOW = "vnvme_shadow_doorbells_total", Counter, "doorbells", ["disk"],
        "Times that an NVMe disk found a new submission queue tail in memory.";
    ARMS = "vnvme_arms_total", Counter, "times", ["disk"],
        "Times that a queue was armed (EventIdx, avail_event) before its worker slept.";
    INTERRUPTS = "vnvme_interrupts_total", Counter, "interrupts", ["disk"],
        "Interrupts sent to the disk's guest.";

    LIMIT_IOPS = "vnvme_limit_operations_per_second", Gauge, "operations per second",
        ["volume", "op"],
        "Limits of a volume with limits; op is all, read or write, and 0 is no limit.";
    LIMIT_BPS = "vnvme_limit_bytes_per_second", Gauge, "bytes per second", ["volume", "op"],
        "Limits of a volume with limits; op is all, read or write, and 0 is no limit.";
    THROTTLED = "vnvme_throttled_seconds_total", Counter, "seconds", ["volume"],
        "Sum of the times for which requests were delayed by the limits.";
    THROTTLED_REQUESTS = "vnvme_throttled_requests_total", Counter, "requests", ["volume"],
        "Requests delayed by the limits.";
    WEIGHT = "vnvme_share_weight", Gauge, "1", ["volume"],
        "Weight of a volume among the slices of its device.";

    VOLUME_ERRORS = "vnvme_volume_errors_total", Counter, "requests", ["volume", "op"],
        "Failed attempts of requests to a volume; op is read or write. Attempts that were repeated \
         successfully, without an error for the guest, are included.";
    VOLUME_NO_SPACE = "vnvme_volume_no_space_total", Counter, "requests", ["volume"],
        "Failed attempts for lack of space.";
    VOLUME_REPEATED = "vnvme_volume_repeated_total", Counter, "requests", ["volume"],
        "Retries of failed requests.";
    VOLUME_STOPPED = "vnvme_volume_stopped", Gauge, "0 or 1", ["volume"],
        "Whether a failed request has stopped the volume: requests wait for vnvme resume.";
    VOLUME_HELD = "vnvme_volume_held_requests", Gauge, "requests", ["volume"],
        "Requests that wait for vnvme resume.";

    PATH_DIRECT = "vnvme_path_direct", Gauge, "0 or 1", ["disk", "namespace"],
        "Whether new commands use the direct path, for namespaces with a direct path to a device.";
    PATH_COMMANDS = "vnvme_path_commands_total", Counter, "commands", ["disk", "namespace"],
        "Commands passed to a device on the direct path.";
    PATH_BOUNCED = "vnvme_path_bounced_total", Counter, "commands", ["disk", "namespace"],
        "Commands on the direct path with data copied through a bounce buffer.";
    DEVICE_UP = "vnvme_device_up", Gauge, "0 or 1", ["device", "state"],
        "Whether a device below is live; its state is live, connecting (a server without a connection), suspended or gone.";
    DEVICE_RESETS = "vnvme_device_resets_total", Counter, "resets", ["device"],
        "Resets of a device below; lost connections to a server.";

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
        "Stalls of a worker: a second or longer without a round.";
    RING_REQUESTS = "vnvme_ring_requests_total", Counter, "requests", ["worker"],
        "Requests to files and block devices through a worker's io_uring.";
    RING_CALLS = "vnvme_ring_system_calls_total", Counter, "system calls", ["worker"],
        "System calls of a worker's io_uring.";

    PROCESS_CPU = "process_cpu_seconds_total", Counter, "seconds", [],
        "Processor time of the process, user and system.";
    PROCESS_RSS = "process_resident_memory_bytes", Gauge, "bytes", [],
        "Resident memory of the process, including mapped guest memory.";
    PROCESS_ANONYMOUS = "vnvme_process_anonymous_memory_bytes", Gauge, "bytes", [],
        "Resident memory of the process without files and guest memory.";
    PROCESS_VM = "process_virtual_memory_bytes", Gauge, "bytes", [],
        "Virtual memory of the process, including mapped guest memory.";
    PROCESS_THREADS = "process_threads", Gauge, "threads", [],
        "Threads of the process.";
    PROCESS_START = "process_start_time_seconds", Gauge, "seconds", [],
        "Start time of the process since 1970-01-01 UTC.";
    PROCESS_RESTARTS = "vnvme_process_restarts_total", Counter, "processes", [],
        "Previous processes under the same keeper.";
    PROCESS_PAUSE = "vnvme_process_last_pause_seconds", Gauge, "seconds", [],
        "Length of the last pause, between the previous process and this one.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn metric_names_are_unique_and_conventional() {
        let mut seen = BTreeSet::new();
        for metric in metrics() {
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
