//! Tests that need a privileged user: a full filesystem, and block devices. Skipped with a line
//! elsewhere.

use crate::common::{WAYS, Worker, disk, sparse};
use std::path::{Path, PathBuf};
use std::process::Command;
use volume::{FileOptions, FileVolume, IoErrorKind, Kind, Op, Volume, VolumeError};

const MIB: u64 = 1 << 20;

/// Runs a command; its output, or the reason for skipping.
fn run(command: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(command)
        .args(arguments)
        .output()
        .map_err(|error| format!("{command}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!(
        "{command}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    ))
}

/// A small filesystem in memory, unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Result<Self, String> {
        run(
            "mount",
            &[
                "-t",
                "tmpfs",
                "-o",
                "size=1m",
                "vnvme-test",
                at.to_str().ok_or("path")?,
            ],
        )?;
        Ok(Self(at.into()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = run("umount", &["-l", self.0.to_str().unwrap_or_default()]);
    }
}

/// A loop device, detached when dropped.
struct Loop(String);

impl Loop {
    fn attach(file: &Path, more: &[&str]) -> Result<Self, String> {
        let mut arguments = vec!["--find", "--show"];
        arguments.extend(more);
        arguments.push(file.to_str().ok_or("path")?);
        run("losetup", &arguments).map(Self)
    }

    /// Flushes that the device has completed (`Documentation/block/stat.rst`, field 16).
    fn flushes(&self) -> u64 {
        let name = self.0.trim_start_matches("/dev/");
        let stat = std::fs::read_to_string(format!("/sys/block/{name}/stat"))
            .expect("the device's counters");
        stat.split_whitespace()
            .nth(15)
            .expect("flushes since Linux 5.5")
            .parse()
            .expect("a number")
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run("losetup", &["-d", &self.0]);
    }
}

#[test]
fn full_filesystem_maps_to_no_space() {
    for way in WAYS {
        let directory = disk();
        let mounted = match Small::mount(directory.path()) {
            Ok(mounted) => mounted,
            Err(why) => {
                return testkit::skip("volume::system::full_filesystem_maps_to_no_space", why);
            }
        };
        let path = sparse(&directory, 4 * MIB);
        let volume = FileVolume::open(&path, FileOptions::default()).unwrap();
        let mut worker = Worker::by(way, &volume);
        let error = worker
            .write(0, &vec![1; 2 << 20])
            .expect_err("more than fits");
        assert_eq!((error.kind, error.errno), (IoErrorKind::NoSpace, 28));
        let zeroes = Op::WriteZeroes {
            deallocate: false,
            fua: false,
        };
        assert_eq!(
            worker
                .without_data(zeroes, 0, 4 * MIB)
                .map_err(|error| error.kind),
            Err(IoErrorKind::NoSpace)
        );
        // The volume lives on: existing data can be read, and deallocated space can be used.
        assert!(worker.read(0, 4096).is_ok());
        assert_eq!(worker.without_data(Op::Deallocate, 0, 4 * MIB), Ok(()));
        assert_eq!(worker.write(2 * MIB, &[7; 4096]), Ok(()));
        assert_eq!(worker.read(2 * MIB, 4096), Ok(vec![7; 4096]));
        drop((worker, volume, mounted));
    }
}

#[test]
fn block_device_reads_back_writes() {
    for way in WAYS {
        let directory = disk();
        let backing = sparse(&directory, 8 * MIB);
        let device = match Loop::attach(&backing, &[]) {
            Ok(device) => device,
            Err(why) => {
                return testkit::skip("volume::system::block_device_reads_back_writes", why);
            }
        };
        let volume = FileVolume::open(&device.0, FileOptions::default()).unwrap();
        let info = volume.info();
        println!("{info:?}");
        assert_eq!(
            (info.kind, info.size, info.block_size),
            (Kind::BlockDevice, 8 * MIB, 512)
        );
        assert!(volume.is_direct());
        let error = FileVolume::open(&device.0, FileOptions::default()).expect_err("two writers");
        assert!(matches!(error, VolumeError::Locked { .. }), "{error}");

        let mut worker = Worker::by(way, &volume);
        let data: Vec<u8> = (0..MIB).map(|index| (index % 253) as u8).collect();
        let before = device.flushes();
        assert_eq!(worker.write(MIB, &data), Ok(()));
        assert_eq!(
            device.flushes(),
            before,
            "a plain write makes nothing durable"
        );
        assert_eq!(worker.without_data(Op::Flush, 0, 0), Ok(()));
        assert_eq!(device.flushes(), before + 1, "a flush reaches the device");
        let list = worker.guest.holding(0, &data[..4096]);
        assert_eq!(
            worker.run(Op::Write { fua: true }, 4096, 4096, list).result,
            Ok(())
        );
        assert_eq!(
            device.flushes(),
            before + 2,
            "a forced write reaches the device's medium"
        );
        assert!(worker.read(MIB, MIB).unwrap() == data);
        assert_eq!(
            worker.without_data(
                Op::WriteZeroes {
                    deallocate: false,
                    fua: true
                },
                MIB,
                65536
            ),
            Ok(())
        );
        assert_eq!(device.flushes(), before + 3);
        if info.deallocate {
            assert_eq!(
                worker.without_data(Op::Deallocate, MIB + 65536, 65536),
                Ok(())
            );
            assert!(
                worker
                    .read(MIB, 131072)
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == 0)
            );
        } else {
            assert!(
                worker
                    .read(MIB, 65536)
                    .unwrap()
                    .iter()
                    .all(|&byte| byte == 0)
            );
            println!("no deallocation on {}", device.0);
        }
        assert!(worker.read(MIB + 131072, MIB - 131072).unwrap() == data[131072..]);
    }
}

#[test]
fn device_with_large_blocks_reads_back_writes() {
    for way in WAYS {
        let directory = disk();
        let device = match Loop::attach(&sparse(&directory, 8 * MIB), &["--sector-size", "4096"]) {
            Ok(device) => device,
            Err(why) => {
                return testkit::skip(
                    "volume::system::device_with_large_blocks_reads_back_writes",
                    why,
                );
            }
        };
        let volume = FileVolume::open(&device.0, FileOptions::default()).unwrap();
        assert_eq!(volume.info().block_size, 4096);
        let mut worker = Worker::by(way, &volume);
        assert_eq!(worker.write(4096, &[9; 4096]), Ok(()));
        assert_eq!(
            worker.write(512, &[9; 512]),
            Err(IoErrorKind::Invalid.into())
        );
        drop((worker, volume));
        // Smaller blocks go through the page cache, when they are asked for.
        let small = FileOptions {
            block_size: Some(512),
            ..FileOptions::default()
        };
        let volume = FileVolume::open(&device.0, small).unwrap();
        assert!(!volume.is_direct());
        let mut worker = Worker::by(way, &volume);
        assert_eq!(worker.write(4096 + 512, &[1; 512]), Ok(()));
        assert_eq!(worker.read(4096, 1024), Ok([[9; 512], [1; 512]].concat()));
        drop((worker, volume));
        let forced = FileOptions {
            direct: volume::Direct::On,
            ..small
        };
        let error = FileVolume::open(&device.0, forced).expect_err("impossible");
        assert!(error.to_string().contains("4096"), "{error}");
    }
}

#[test]
fn read_only_device_is_opened_read_only() {
    let directory = disk();
    let device = match Loop::attach(&sparse(&directory, 8 * MIB), &["--read-only"]) {
        Ok(device) => device,
        Err(why) => {
            return testkit::skip("volume::system::read_only_device_is_opened_read_only", why);
        }
    };
    let error = FileVolume::open(&device.0, FileOptions::default()).expect_err("not for writing");
    assert!(error.to_string().contains("--read-only"), "{error}");
    let options = FileOptions {
        read_only: true,
        ..FileOptions::default()
    };
    let volume = FileVolume::open(&device.0, options).unwrap();
    assert_eq!(Worker::new(&volume).read(0, 4096), Ok(vec![0; 4096]));
}
