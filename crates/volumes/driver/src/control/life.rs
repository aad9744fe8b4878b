//! Suspend, resume and release of a controller at the request of the application or system.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{DeviceState, SharedDevice};
use crate::admin::relax;
use crate::error::Error;
use sync::Unpoisoned;

impl SharedDevice {
    /// Shuts the controller down in order and disables it. Until [`SharedDevice::resume`], queue
    /// pairs keep their outstanding commands and accept more.
    pub fn suspend(&self) -> Result<(), Error> {
        let mut control = self.lock();
        match self.state() {
            DeviceState::Live => {}
            DeviceState::Suspended => return Ok(()),
            _ => return Err(Error::Gone),
        }
        if let Err(error) = control.shut_down(&*self.transport) {
            tracing::debug!(%error, "shutdown");
        }
        if let Err(error) = control.disable(&*self.transport) {
            tracing::error!(%error, "the device cannot be suspended; giving it up");
            self.give_up(&mut control);
            return Err(Error::Gone);
        }
        control.grave.clear();
        self.enter(DeviceState::Suspended);
        Ok(())
    }

    /// Brings a suspended controller up again, regardless of resets meanwhile; queue pairs repeat
    /// their commands. After an error the controller is still suspended.
    pub fn resume(&self) -> Result<(), Error> {
        let mut control = self.lock();
        match self.state() {
            DeviceState::Live => return Ok(()),
            DeviceState::Suspended => {}
            _ => return Err(Error::Gone),
        }
        self.transport.set_bus_master(true)?;
        control.disable(&*self.transport)?;
        let wanted = self.limits.io_queues;
        if control.bring_up(&self.transport, &self.options, wanted)? < wanted {
            return Err(Error::Unusable("it allows fewer queues than before"));
        }
        let namespaces = control.scan(&self.options)?;
        control.replace(namespaces);
        self.enter(DeviceState::Live);
        Ok(())
    }

    /// Refuses new commands, lets outstanding ones end within `limit`, then shuts the controller
    /// down. Returns whether all of them ended by themselves; the remaining ones fail as lost.
    pub fn release(&self, limit: Duration) -> bool {
        {
            let _control = self.lock();
            if self.state() == DeviceState::Live {
                self.enter(DeviceState::Draining);
            }
        }
        let deadline = Instant::now() + limit;
        let mut round = 0;
        while self.state() == DeviceState::Draining
            && self.in_flight() > 0
            && Instant::now() < deadline
        {
            relax(&*self.transport, round);
            round += 1;
        }
        let drained = self.in_flight() == 0;
        self.close();
        if let Err(error) = self.transport.release() {
            tracing::debug!(%error, "release");
        }
        drained
    }

    /// Sets the operating state of the device, and changes the epoch so that queue pairs notice it.
    fn enter(&self, state: DeviceState) {
        self.state.store(state as u8, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Creates the cell in which a new queue pair publishes its number of outstanding commands.
    pub fn new_cell(&self) -> Arc<AtomicU32> {
        let cell = Arc::new(AtomicU32::new(0));
        let mut flying = self.flying.lock().unpoisoned();
        flying.retain(|cell| cell.strong_count() > 0);
        flying.push(Arc::downgrade(&cell));
        cell
    }

    fn in_flight(&self) -> u64 {
        let flying = self.flying.lock().unpoisoned();
        let cells = flying.iter().filter_map(Weak::upgrade);
        cells
            .map(|cell| u64::from(cell.load(Ordering::Acquire)))
            .sum()
    }

    /// Returns a descriptor that becomes readable when the system asks for the device, for example
    /// before unbinding it; `None` on a transport without such requests.
    pub fn request_eventfd(&self) -> Result<Option<OwnedFd>, Error> {
        let system = |source: std::io::Error| Error::System {
            what: "eventfd",
            source,
        };
        let mut control = self.lock();
        if control.request.is_none() {
            let flags =
                rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
            let fd = rustix::event::eventfd(0, flags).map_err(|errno| system(errno.into()))?;
            if !self.transport.set_request(Some(fd.as_fd()))? {
                return Ok(None);
            }
            control.request = Some(fd);
        }
        let fd = control
            .request
            .as_ref()
            .map(|fd| fd.as_fd().try_clone_to_owned());
        fd.transpose().map_err(system)
    }
}
