//! Attributes of a block device from `/sys/dev/block`.

use std::fs;
use std::path::{Path, PathBuf};

/// A block device's place in sysfs.
pub(super) struct Device {
    own: PathBuf,
    /// The whole disk's, for a partition.
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

    /// The medium cannot be written.
    pub(super) fn read_only(&self) -> bool {
        read(&self.own, "ro").is_some_and(|value| value != "0")
    }

    /// Ranges can be zeroed by giving their blocks back.
    pub(super) fn punches(&self) -> bool {
        self.number("queue/write_zeroes_max_bytes")
            .is_some_and(|bytes| bytes > 0)
    }

    /// Unit in which blocks are deallocated, in bytes.
    pub(super) fn discard_granularity(&self) -> Option<u64> {
        self.number("queue/discard_granularity")
            .filter(|&bytes| bytes > 0)
    }

    /// Unit of I/O that the device prefers, in bytes.
    pub(super) fn optimal_io(&self) -> Option<u64> {
        let optimal = self
            .number("queue/optimal_io_size")
            .filter(|&bytes| bytes > 0);
        optimal.or_else(|| self.number("queue/physical_block_size"))
    }

    /// A name that the device keeps over reboots, where it has one.
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
