//! Volumes served to a guest as one NVMe controller: by `vnvme`, or, to check the harness and the
//! tests themselves, by QEMU's own controller (`VNVME_TEST_CONTROLLER=qemu`).

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::daemon::Daemon;
use crate::machine::Disk;

/// Program that emulates the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// The program under test.
    Vnvme,
    /// QEMU's `-device nvme`.
    Qemu,
}

impl Controller {
    /// The controller that the environment asks for.
    pub fn chosen() -> Result<Controller> {
        match std::env::var("VNVME_TEST_CONTROLLER").as_deref() {
            Ok("qemu") => Ok(Controller::Qemu),
            Ok("" | "vnvme") | Err(_) => Ok(Controller::Vnvme),
            Ok(other) => bail!("VNVME_TEST_CONTROLLER is {other:?}; it may be vnvme or qemu"),
        }
    }
}

/// Volumes to serve, and options.
#[derive(Clone, Debug)]
pub struct Volumes {
    /// Names the logs.
    pub name: String,
    /// Raw files, one namespace each.
    pub files: Vec<PathBuf>,
    /// Logical block size in bytes, 512 or 4096.
    pub block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Further options for `vnvme serve`.
    pub options: Vec<String>,
}

impl Volumes {
    /// Describes one raw file, with 512-byte blocks, writable.
    pub fn file(name: &str, file: impl Into<PathBuf>) -> Volumes {
        Volumes {
            name: name.to_string(),
            files: vec![file.into()],
            block_size: 512,
            read_only: false,
            options: Vec::new(),
        }
    }

    /// Serves them.
    pub fn serve(self) -> Result<ServedVolumes> {
        if Controller::chosen()? == Controller::Qemu {
            let disk = Disk::QemuNvme {
                files: self.files,
                block_size: self.block_size,
                read_only: self.read_only,
            };
            return Ok(ServedVolumes { disk, daemon: None });
        }
        let mut daemon = Daemon::builder(&self.name)
            .arg("--block-size")
            .arg(self.block_size.to_string());
        if self.read_only {
            daemon = daemon.arg("--read-only");
        }
        for option in self.options {
            daemon = daemon.arg(option);
        }
        for file in self.files {
            daemon = daemon.volume(file);
        }
        let daemon = daemon.start()?;
        let disk = Disk::VfioUser {
            socket: daemon.socket().to_path_buf(),
        };
        Ok(ServedVolumes {
            disk,
            daemon: Some(daemon),
        })
    }
}

/// Served volumes.
#[derive(Debug)]
pub struct ServedVolumes {
    disk: Disk,
    daemon: Option<Daemon>,
}

impl ServedVolumes {
    /// The disk to give to a guest.
    pub fn disk(&self) -> Disk {
        self.disk.clone()
    }

    /// The daemon; an error where QEMU plays the controller.
    pub fn daemon(&self) -> Result<&Daemon> {
        self.daemon
            .as_ref()
            .context("there is no daemon: VNVME_TEST_CONTROLLER is qemu")
    }

    /// Ends the daemon cleanly, which it must manage; nothing to do where
    /// QEMU plays the controller.
    pub fn finish(self) -> Result<()> {
        self.daemon.as_ref().map_or(Ok(()), Daemon::terminate)
    }
}
