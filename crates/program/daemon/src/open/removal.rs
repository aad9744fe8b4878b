//! Devices that the kernel asks to release: they are being unbound, or pulled out.

use crate::confine::spawn_early;
use anyhow::{Context, Result};
use config::choices::SandboxMode;
use driver::Device;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum time for outstanding commands to complete before a device is removed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for the kernel's request, in a thread of its own, and answers it: commands in flight are
/// drained, the device is shut down and released, and guests see errors from then on. Ends when
/// dropped.
pub struct RemovalWatch {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl RemovalWatch {
    /// Starts to watch for removal requests; `None` for a device that the kernel cannot ask for.
    pub fn start(device: &Device, name: &str, sandbox: SandboxMode) -> Result<Option<Self>> {
        let Some(request) = device.request_eventfd()? else {
            return Ok(None);
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("eventfd")?;
        let told = stop.try_clone().context("eventfd")?;
        let (device, name) = (device.clone(), name.to_owned());
        let wait = move || wait(&device, &name, &request, &told);
        let thread = spawn_early("removal", sandbox, wait)?;
        Ok(Some(Self {
            stop,
            thread: Some(thread),
        }))
    }
}

fn wait(device: &Device, name: &str, request: &OwnedFd, stop: &OwnedFd) {
    loop {
        let mut fds = [
            PollFd::new(request, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(device = name, %error, "the kernel's request for the device will not be seen");
                return;
            }
        }
        let [asked, stopped] = fds.map(|fd| !fd.revents().is_empty());
        if stopped {
            return;
        }
        if asked {
            tracing::warn!(
                device = name,
                "the kernel asks for the device: releasing it"
            );
            let drained = device.release(DRAIN_TIMEOUT);
            tracing::warn!(device = name, drained, "the device was released");
            return;
        }
    }
}

impl Drop for RemovalWatch {
    fn drop(&mut self) {
        let _ = rustix::io::write(self.stop.as_fd(), &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
