//! Devices that the system asks to have back: somebody unbinds them, or pulls them out.

use anyhow::{Context, Result};
use driver::Device;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long commands in flight may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits for the system's request, in a thread of its own, and answers it: commands in flight end, the device is shut down
/// and let go of, and guests see errors from then on. Ends when dropped.
pub struct Watch {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `None` for a device that nobody will ask for.
    pub fn start(device: &Device, name: &str) -> Result<Option<Self>> {
        let Some(request) = device.request_eventfd()? else {
            return Ok(None);
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("eventfd")?;
        let told = stop.try_clone().context("eventfd")?;
        let (device, name) = (device.clone(), name.to_owned());
        let builder = std::thread::Builder::new().name("give-back".into());
        let thread = builder.spawn(move || wait(&device, &name, &request, &told));
        Ok(Some(Self {
            stop,
            thread: Some(thread.context("thread")?),
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
                tracing::error!(device = name, %error, "requests for the device are not heard");
                return;
            }
        }
        let [asked, over] = fds.map(|fd| !fd.revents().is_empty());
        if over {
            return;
        }
        if asked {
            tracing::warn!(
                device = name,
                "the system asks for the device: giving it back"
            );
            let drained = device.release(PATIENCE);
            tracing::warn!(device = name, drained, "the device was given back");
            return;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = rustix::io::write(self.stop.as_fd(), &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
