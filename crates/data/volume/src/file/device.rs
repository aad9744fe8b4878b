//! Attributes of a block device from `/sys/dev/block`.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory of a block device in sysfs, from which its properties are read.
pub(super) struct Device {
    own: PathBuf,
    /// Directory of the whole disk if the device is a partition, otherwise equal to `own`.
    disk: PathBuf,
    partition: Option<String>,
}

impl Device {
    /// The device with these numbers, or nothing where sysfs does not show it (also for filesystems
    /// that do not stand on a block device).
    pub(super) fn find(major: u32, minor: u32) -> Option<Self> {
        let own = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        let partition = read(&own, "partition");
        let disk = match (&partition, own.parent()) {
            (Some(_), Some(parent)) => parent.to_path_buf(),
            _ => own.clone(),
        };
        Some(Self {
            own,
            disk,
            partition,
        })
    }

    /// Returns whether the block device refuses writes (attribute `ro`).
    pub(super) fn read_only(&self) -> bool {
        read(&self.own, "ro").is_some_and(|value| value != "0")
    }

    /// Returns whether the device can zero ranges without writing them.
    pub(super) fn punches(&self) -> bool {
        self.number("queue/write_zeroes_max_bytes")
            .is_some_and(|bytes| bytes > 0)
    }

    /// Returns the unit in bytes in which the device deallocates blocks, if it does so.
    pub(super) fn discard_granularity(&self) -> Option<u64> {
        self.number("queue/discard_granularity")
            .filter(|&bytes| bytes > 0)
    }

    /// Returns the size in bytes of I/O that the device prefers.
    pub(super) fn optimal_io(&self) -> Option<u64> {
        let optimal = self
            .number("queue/optimal_io_size")
            .filter(|&bytes| bytes > 0);
        optimal.or_else(|| self.number("queue/physical_block_size"))
    }

    /// Returns a name of the disk that is stable across reboots, if the system knows one.
    pub(super) fn lasting_name(&self) -> Option<String> {
        let disk = ["wwid", "device/wwid", "dm/uuid", "md/uuid"]
            .iter()
            .find_map(|name| read(&self.disk, name))
            .filter(|name| !name.is_empty())?;
        Some(match &self.partition {
            Some(partition) => format!("{disk}-part{partition}"),
            None => disk,
        })
    }

    /// Number of the medium's attachment to the system, which no other has had since the system was
    /// started (Linux 5.15): loop and network devices are used for one medium after the other.
    pub(super) fn attachment(&self) -> Option<String> {
        let number = read(&self.disk, "diskseq")?;
        Some(match &self.partition {
            Some(partition) => format!("{number}, partition {partition}"),
            None => number,
        })
    }

    fn number(&self, name: &str) -> Option<u64> {
        read(&self.disk, name)?.parse().ok()
    }
}

fn read(directory: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(directory.join(name)).ok()?;
    Some(text.trim().to_owned())
}
