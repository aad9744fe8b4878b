//! Control commands of the ublk driver.

use crate::UblkError;
use crate::sys::ControlRing;
use crate::uapi::{self, CtrlCmd, DevInfo, Params};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const CONTROL: &str = "/dev/ublk-control";
/// Value that stands for any free device number, or for no queue.
const ANY: u32 = u32::MAX;
const NO_QUEUE: u16 = u16::MAX;
/// Maximum time to wait until the kernel has noticed the end of a killed server.
const RECOVERY_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time to wait until the node of a new device appears in /dev.
const NODE_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Connection to the ublk driver's control device, for commands about block devices.
pub(crate) struct Control {
    ring: ControlRing,
    /// Feature bits that the kernel's ublk driver supports.
    pub(crate) features: u64,
}

fn command(id: u32, data: u64) -> CtrlCmd {
    CtrlCmd {
        dev_id: id,
        queue_id: NO_QUEUE,
        data,
        ..CtrlCmd::default()
    }
}

fn no(error: &io::Error, errno: i32) -> bool {
    error.raw_os_error() == Some(errno)
}

impl Control {
    pub(crate) fn open() -> Result<Self, UblkError> {
        let device = match open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(device) => device,
            Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => return Err(UblkError::NoDriver),
            Err(Errno::ACCESS | Errno::PERM) => {
                return Err(UblkError::Permission {
                    path: CONTROL.into(),
                });
            }
            Err(errno) => return Err(UblkError::system(CONTROL)(errno.into())),
        };
        let ring = ControlRing::new(device).map_err(UblkError::system("io_uring"))?;
        let mut control = Self { ring, features: 0 };
        let mut features = 0u64;
        let told = control.buffer(uapi::GET_FEATURES, command(ANY, 0), features.as_mut_bytes());
        if told.is_err() || features & uapi::F_CMD_IOCTL_ENCODE == 0 {
            return Err(UblkError::TooOld {
                what: "the list of its features",
            });
        }
        control.features = features;
        Ok(control)
    }

    fn buffer(&mut self, op: u32, command: CtrlCmd, buffer: &mut [u8]) -> io::Result<i32> {
        self.ring.with_buffer(op, command, buffer)
    }

    fn plain(&mut self, op: u32, command: CtrlCmd) -> io::Result<i32> {
        self.ring.execute(op, command, &mut || true)
    }

    /// Returns the information on a device, if there is one of that number.
    pub(crate) fn info(&mut self, id: u32) -> Result<Option<DevInfo>, UblkError> {
        let mut info = DevInfo::default();
        match self.buffer(uapi::GET_DEV_INFO, command(id, 0), info.as_mut_bytes()) {
            Ok(_) => Ok(Some(info)),
            Err(error) if no(&error, libc::ENODEV) => Ok(None),
            Err(error) => Err(UblkError::system("asking for it")(error)),
        }
    }

    /// Creates a device; returns its information, with its number and the flags that the kernel
    /// accepted.
    pub(crate) fn add(&mut self, id: Option<u32>, mut info: DevInfo) -> Result<DevInfo, UblkError> {
        let id = id.unwrap_or(ANY);
        info.dev_id = id;
        match self.buffer(uapi::ADD_DEV, command(id, 0), info.as_mut_bytes()) {
            Ok(_) => Ok(info),
            Err(error) if no(&error, libc::EPERM) || no(&error, libc::EACCES) => {
                Err(UblkError::Permission {
                    path: CONTROL.into(),
                })
            }
            Err(error) => Err(UblkError::system("making it")(error)),
        }
    }

    pub(crate) fn set_params(&mut self, id: u32, mut params: Params) -> Result<(), UblkError> {
        let set = self.buffer(uapi::SET_PARAMS, command(id, 0), params.as_mut_bytes());
        set.map(drop).map_err(UblkError::system("its parameters"))
    }

    pub(crate) fn params(&mut self, id: u32) -> Result<Params, UblkError> {
        let mut params = Params {
            len: size_of::<Params>() as u32,
            ..Params::default()
        };
        let mut bytes = [0; size_of::<Params>()];
        bytes.copy_from_slice(params.as_bytes());
        self.buffer(uapi::GET_PARAMS, command(id, 0), &mut bytes)
            .map_err(UblkError::system("its parameters"))?;
        if let Ok(told) = Params::read_from_bytes(&bytes) {
            params = told;
        }
        Ok(params)
    }

    /// Makes the block device visible, once all queues fetch requests. Polls `sensible`, and gives
    /// up when it returns `false` because a queue has ended.
    pub(crate) fn start(
        &mut self,
        id: u32,
        recovered: bool,
        sensible: &mut dyn FnMut() -> bool,
    ) -> Result<(), UblkError> {
        let op = if recovered {
            uapi::END_USER_RECOVERY
        } else {
            uapi::START_DEV
        };
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        match self.ring.execute(op, command(id, pid as u64), sensible) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(UblkError::QueueEnded { id })
            }
            Err(error) => Err(UblkError::system("starting it")(error)),
        }
    }

    /// Starts the recovery of a device that a dead server has left.
    pub(crate) fn begin_recovery(&mut self, id: u32) -> Result<(), UblkError> {
        let deadline = Instant::now() + RECOVERY_LIMIT;
        loop {
            match self.plain(uapi::START_USER_RECOVERY, command(id, 0)) {
                Ok(_) => return Ok(()),
                // The kernel has not finished with the previous server.
                Err(error) if no(&error, libc::EBUSY) && Instant::now() < deadline => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                Err(error) => return Err(UblkError::system("taking it over")(error)),
            }
        }
    }

    /// Stops the block device with this number, after its outstanding requests have completed.
    pub(crate) fn stop(&mut self, id: u32) -> Result<(), UblkError> {
        match self.plain(uapi::STOP_DEV, command(id, 0)) {
            Ok(_) => Ok(()),
            Err(error) if no(&error, libc::ENODEV) => Ok(()),
            Err(error) => Err(UblkError::system("stopping it")(error)),
        }
    }

    /// Deletes the device with this number after all users have closed it.
    pub(crate) fn delete(&mut self, id: u32) -> Result<(), UblkError> {
        match self.plain(uapi::DEL_DEV, command(id, 0)) {
            Ok(_) => Ok(()),
            Err(error) if no(&error, libc::ENODEV) => Ok(()),
            Err(error) => Err(UblkError::system("removing it")(error)),
        }
    }

    /// Deletes a device, but waits only while `sensible` returns `true`. Returns `false` if the
    /// device is still open.
    pub(crate) fn delete_before(
        &mut self,
        id: u32,
        sensible: &mut dyn FnMut() -> bool,
    ) -> Result<bool, UblkError> {
        match self.ring.execute(uapi::DEL_DEV, command(id, 0), sensible) {
            Ok(_) => Ok(true),
            Err(error) if no(&error, libc::ENODEV) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(false),
            Err(error) => Err(UblkError::system("removing it")(error)),
        }
    }

    /// Announces a new size in bytes. Returns `false` if the kernel does not support it.
    pub(crate) fn resize(&mut self, id: u32, size: u64) -> Result<bool, UblkError> {
        if self.features & uapi::F_UPDATE_SIZE == 0 {
            return Ok(false);
        }
        let resized = self.plain(uapi::UPDATE_SIZE, command(id, size / 512));
        resized.map_err(UblkError::system("its new size"))?;
        Ok(true)
    }
}

/// Opens the node `/dev/ublkcN`, through which a server gets the device's requests.
pub(crate) fn open_device(id: u32) -> Result<OwnedFd, UblkError> {
    let path = format!("/dev/ublkc{id}");
    let deadline = Instant::now() + NODE_TIMEOUT;
    loop {
        match open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(device) => return Ok(device),
            // udev creates the node, and sets its owner, a moment later. A killed process keeps it
            // open for a moment.
            Err(Errno::NOENT | Errno::ACCESS | Errno::BUSY) if Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(Errno::ACCESS) => return Err(UblkError::Permission { path }),
            Err(errno) => return Err(UblkError::system("its node in /dev")(errno.into())),
        }
    }
}
