//! Guards against writing to a volume that is in use: a claim on the block device excludes users in
//! the kernel, and a lock on the file excludes other processes.

use crate::bind::{Host, users};
use anyhow::{Context, Result, bail};
use driver::vfio::sysfs::entries;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use volume::{FileOptions, FileVolume, VolumeError};

/// Claims a file or block device. While the claim exists, nothing else can mount it, serve it, or
/// write to it with `vnvme bench`.
pub fn claim(host: &Host, path: &Path) -> Result<Option<FileVolume>> {
    let meta = fs::metadata(path).with_context(|| format!("{}", path.display()))?;
    let user = if meta.file_type().is_block_device() {
        let number = meta.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        users(host, &format!("{major}:{minor}"))
    } else {
        loop_device(host, path)
    };
    if let Some(user) = user {
        bail!("{} is in use: {user}", path.display());
    }
    match FileVolume::open(path, FileOptions::default()) {
        Ok(volume) => Ok(Some(volume)),
        // Without lock support, no other process can have locked it either.
        Err(VolumeError::LockUnsupported { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the loop device that uses the file, if any. It may be mounted, which the file itself
/// does not show.
fn loop_device(host: &Host, path: &Path) -> Option<String> {
    let wanted = path.canonicalize().ok()?;
    let devices = host.sysfs.path("block");
    entries(&devices).into_iter().find_map(|name| {
        let backing = fs::read_to_string(devices.join(&name).join("loop/backing_file")).ok()?;
        let backing = Path::new(backing.trim_end_matches('\n'));
        (backing == wanted).then(|| format!("it is behind /dev/{name}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use driver::vfio::sysfs::Sysfs;

    fn host(root: &Path) -> Host {
        Host {
            sysfs: Sysfs::at(root.join("sys")),
            proc: root.join("proc"),
            dev: root.join("dev"),
        }
    }

    #[test]
    fn file_behind_loop_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.raw");
        fs::write(&disk, [0; 4096]).unwrap();
        let device = dir.path().join("sys/block/loop3/loop");
        fs::create_dir_all(&device).unwrap();
        let other = dir.path().join("other.raw");
        let real = disk.canonicalize().unwrap();
        fs::write(
            device.join("backing_file"),
            format!("{}\n", other.display()),
        )
        .unwrap();
        assert!(claim(&host(dir.path()), &disk).unwrap().is_some());
        fs::write(device.join("backing_file"), format!("{}\n", real.display())).unwrap();
        let text = claim(&host(dir.path()), &disk).unwrap_err().to_string();
        assert!(
            text.ends_with("is in use: it is behind /dev/loop3"),
            "{text}"
        );
    }

    #[test]
    fn file_of_other_load_or_server_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.raw");
        fs::write(&disk, [0; 4096]).unwrap();
        let held = claim(&host(dir.path()), &disk).unwrap();
        let text = claim(&host(dir.path()), &disk).unwrap_err().to_string();
        assert!(text.contains("in use"), "{text}");
        drop(held);
        claim(&host(dir.path()), &disk).unwrap();
    }
}
