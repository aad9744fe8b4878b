//! Figures quoted from the documents that this project follows.

/// A series of figures in a document.
pub struct Series {
    pub name: &'static str,
    /// Points of the series: depth, queues (fio's jobs), value.
    pub points: &'static [(u32, u32, f64)],
}

/// QEMU's shadow doorbell series (seeds/000): 4 KiB random reads with fio and libaio on null-co,
/// KVM.
pub const QEMU_IOPS: [Series; 2] = [
    Series {
        name: "QEMU series: off",
        points: &[
            (1, 1, 25_100.0),
            (2, 1, 25_900.0),
            (4, 1, 24_500.0),
            (8, 1, 24_000.0),
        ],
    },
    Series {
        name: "QEMU series: on",
        points: &[
            (1, 1, 29_100.0),
            (2, 1, 60_100.0),
            (4, 1, 99_800.0),
            (8, 1, 82_500.0),
        ],
    },
];

/// Measurements of the same QEMU series: MMIO for each I/O, by perf-kvm.
pub const QEMU_MMIO: [Series; 2] = [
    Series {
        name: "QEMU series: off",
        points: &[(1, 1, 2.01), (2, 1, 1.99), (4, 1, 1.99), (8, 1, 1.99)],
    },
    Series {
        name: "QEMU series: on",
        points: &[(1, 1, 1.00), (2, 1, 0.52), (4, 1, 0.27), (8, 1, 0.46)],
    },
];

/// Collabora's post (seeds/001): a cloud provider's virtual NVMe disk, depth 32.
pub const COLLABORA: [Series; 2] = [
    Series {
        name: "Collabora: off",
        points: &[(32, 1, 43_900.0)],
    },
    Series {
        name: "Collabora: on",
        points: &[(32, 1, 184_000.0)],
    },
];

/// The Linux patch (seeds/002): a null device, depth 32, 4 jobs.
pub const LINUX: [Series; 2] = [
    Series {
        name: "Linux patch: off",
        points: &[(32, 4, 200_000.0)],
    },
    Series {
        name: "Linux patch: on",
        points: &[(32, 4, 1_000_000.0)],
    },
];

/// The userspace driver of QEMU (seeds/003): gain over linux-aio, by load and depth.
pub const DRIVER: [(&str, u32, f64); 6] = [
    ("randread", 1, 0.12),
    ("randread", 4, 0.20),
    ("randwrite", 1, 0.22),
    ("randwrite", 4, 0.12),
    ("randrw", 1, 0.03),
    ("randrw", 4, 0.22),
];

/// nvme-mdev (seeds/004): its measurements at depth 1.
pub struct Mdev {
    pub case: &'static str,
    pub iops: f64,
    pub latency_us: f64,
    pub translate: Option<f64>,
    pub complete: Option<f64>,
    pub interrupt: Option<f64>,
}

const fn mdev(case: &'static str, iops: f64, latency_us: f64, cycles: [Option<f64>; 3]) -> Mdev {
    Mdev {
        case,
        iops,
        latency_us,
        translate: cycles[0],
        complete: cycles[1],
        interrupt: cycles[2],
    }
}

/// Table of nvme-mdev's series: with polling, then with interrupts. The document's interrupt
/// latencies are those of the whole I/O.
pub const MDEV: [Mdev; 6] = [
    mdev("bare", 147_182.0, 6.516, [None; 3]),
    mdev(
        "direct",
        137_214.0,
        7.038,
        [Some(668.032), Some(411.791), None],
    ),
    mdev(
        "generic",
        131_324.0,
        7.367,
        [Some(1509.207), Some(1005.299), None],
    ),
    mdev("bare interrupt", 109_662.0, 8.844, [None; 3]),
    mdev(
        "direct interrupt",
        102_739.0,
        9.494,
        [Some(639.993), Some(398.824), Some(612.795)],
    ),
    mdev(
        "generic interrupt",
        98_394.0,
        9.897,
        [Some(1537.659), Some(976.604), Some(596.916)],
    ),
];
