//! NVMe devices that volumes use, which the control socket lists, suspends and resumes; and the
//! servers of remote volumes, which it lists.

use control::Error;
use control::api::{DeviceState, DeviceStatus};
use driver::Device;
use remote::ReachWatch;
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// Registry of the NVMe devices that volumes use, under the names that the user gave them.
#[derive(Clone, Default)]
pub struct DeviceRegistry {
    devices: Arc<Mutex<Vec<(String, Device)>>>,
    /// Connection states of network volumes, including volumes that may be closed by now.
    servers: Arc<Mutex<Vec<ReachWatch>>>,
}

/// Request to suspend or resume an NVMe device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Shut the device down. Commands are held until the device is resumed.
    Suspend,
    /// Restart the device and execute the held commands.
    Resume,
}

fn status(name: &str, device: &Device) -> DeviceStatus {
    let state = match (device.is_gone(), device.is_suspended()) {
        (true, _) => DeviceState::Gone,
        (_, true) => DeviceState::Suspended,
        _ => DeviceState::Live,
    };
    DeviceStatus {
        device: name.to_owned(),
        state,
        resets: device.resets(),
    }
}

/// Returns the address in a device's URL: a PCI address, or the path of a socket.
fn address(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, address)| address)
}

impl DeviceRegistry {
    /// Adds an NVMe device to the registry under its name.
    pub fn enter(&self, name: &str, device: &Device) {
        let mut list = self.devices.lock().unpoisoned();
        list.push((name.to_owned(), device.clone()));
    }

    /// Adds the connection state of a network volume to the registry.
    pub fn enter_server(&self, server: ReachWatch) {
        let mut list = self.servers.lock().unpoisoned();
        list.retain(|known| known.look().is_some());
        list.push(server);
    }

    /// Returns the status of all devices and servers; each name appears once.
    pub fn list(&self) -> Vec<DeviceStatus> {
        let list = self.devices.lock().unpoisoned();
        let all = list.iter();
        let mut all: Vec<_> = all.map(|(name, device)| status(name, device)).collect();
        drop(list);
        let servers = self.servers.lock().unpoisoned();
        for reach in servers.iter().filter_map(ReachWatch::look) {
            let state = if reach.connected {
                DeviceState::Live
            } else {
                DeviceState::Connecting
            };
            // Several volumes can use the same server.
            match all.iter_mut().find(|known| known.device == reach.server) {
                Some(known) => {
                    known.resets = known.resets.saturating_add(reach.lost);
                    if state != DeviceState::Live {
                        known.state = state;
                    }
                }
                None => all.push(DeviceStatus {
                    device: reach.server,
                    state,
                    resets: reach.lost,
                }),
            }
        }
        all
    }

    /// Suspends or resumes a device, and waits for the result. `named` is its URL or the address in
    /// it.
    ///
    /// # Errors
    /// [`Error`] when no device has this name, it is already in that state, or the operation fails.
    pub fn change(&self, named: &str, action: Action) -> Result<DeviceStatus, Error> {
        let (name, device) = self.find(named)?;
        let result = match (action, status(&name, &device).state) {
            (_, DeviceState::Gone | DeviceState::Connecting) => {
                return Err(Error::conflict(format!("{name} is no longer available")));
            }
            (Action::Suspend, DeviceState::Suspended) => {
                return Err(Error::conflict(format!("{name} is suspended already")));
            }
            (Action::Resume, DeviceState::Live) => {
                return Err(Error::conflict(format!("{name} is not suspended")));
            }
            (Action::Suspend, DeviceState::Live) => device.suspend(),
            (Action::Resume, DeviceState::Suspended) => device.resume(),
        };
        result.map_err(|error| Error::failed(format!("{name}: {error}")))?;
        tracing::warn!(device = name, ?action, "changed through the control socket");
        Ok(status(&name, &device))
    }

    fn find(&self, named: &str) -> Result<(String, Device), Error> {
        let list = self.devices.lock().unpoisoned();
        let mut meant = list
            .iter()
            .filter(|(url, _)| url == named || address(url) == named);
        match (meant.next(), meant.next()) {
            (Some((url, device)), None) => Ok((url.clone(), device.clone())),
            (Some(_), Some(_)) => Err(Error::conflict(format!(
                "several devices have the address \"{named}\": give the URL of one"
            ))),
            (None, _) if list.is_empty() => Err(Error::not_found(
                "this process drives no device: only nvme:// and vfio-user:// volumes do",
            )),
            (None, _) => {
                let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
                Err(Error::not_found(format!(
                    "no device is called \"{named}\"; this process drives: {}",
                    names.join(", ")
                )))
            }
        }
    }
}
