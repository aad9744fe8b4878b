//! Devices below, as the control socket shows, suspends and resumes them.

use anyhow::Result;
use driver::Device;
use output::{OutputError, outln};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};
use sync::Unpoisoned;

/// The devices that volumes stand on, under the names that the user gave them.
#[derive(Clone, Default)]
pub struct DeviceRegistry(Arc<Mutex<Vec<(String, Device)>>>);

/// What a device is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Shut down, and keep commands until it is resumed.
    Suspend,
    /// Come up again, and repeat what was kept.
    Resume,
}

/// A device and what it is to do.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceChange {
    /// Its URL, or a part of that which only it has.
    pub device: String,
    /// What it is to do.
    pub action: Action,
}

/// How a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// At work.
    Live,
    /// Suspended: commands wait.
    Suspended,
    /// Removed, released or broken.
    Gone,
}

/// One device.
#[derive(Debug, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its URL.
    pub device: String,
    /// How it is.
    pub state: DeviceState,
    /// Controller resets so far.
    pub resets: u64,
}

impl DeviceStatus {
    fn of(name: &str, device: &Device) -> Self {
        let state = match (device.is_gone(), device.is_suspended()) {
            (true, _) => DeviceState::Gone,
            (_, true) => DeviceState::Suspended,
            _ => DeviceState::Live,
        };
        Self {
            device: name.to_owned(),
            state,
            resets: device.resets(),
        }
    }

    /// For people.
    pub fn print(&self) -> Result<(), OutputError> {
        let state = match self.state {
            DeviceState::Live => "at work",
            DeviceState::Suspended => "suspended: commands wait for vnvme resume",
            DeviceState::Gone => "gone",
        };
        outln!("{}  {state}   resets {}", self.device, self.resets);
        Ok(())
    }
}

impl DeviceRegistry {
    /// Enters a device.
    pub fn enter(&self, name: &str, device: &Device) {
        let mut list = self.0.lock().unpoisoned();
        list.push((name.to_owned(), device.clone()));
    }

    /// All there are.
    pub fn list(&self) -> Vec<DeviceStatus> {
        let list = self.0.lock().unpoisoned();
        let all = list.iter();
        all.map(|(name, device)| DeviceStatus::of(name, device))
            .collect()
    }

    /// Suspends or resumes a device; returns when that is done. The error is a sentence for the
    /// user.
    pub fn change(&self, change: &DeviceChange) -> Result<DeviceStatus, String> {
        let (name, device) = self.find(&change.device)?;
        let status = DeviceStatus::of(&name, &device);
        let result = match (change.action, status.state) {
            (_, DeviceState::Gone) => return Err(format!("{name} is gone")),
            (Action::Suspend, DeviceState::Suspended) => {
                return Err(format!("{name} is suspended already"));
            }
            (Action::Resume, DeviceState::Live) => return Err(format!("{name} is not suspended")),
            (Action::Suspend, DeviceState::Live) => device.suspend(),
            (Action::Resume, DeviceState::Suspended) => device.resume(),
        };
        result.map_err(|error| format!("{name}: {error}"))?;
        tracing::warn!(device = name, action = ?change.action, "as the control socket asked for");
        Ok(DeviceStatus::of(&name, &device))
    }

    fn find(&self, text: &str) -> Result<(String, Device), String> {
        let list = self.0.lock().unpoisoned();
        let mut meant: Vec<_> = list
            .iter()
            .filter(|(name, _)| name.contains(text))
            .collect();
        if meant.iter().any(|(name, _)| name == text) {
            meant.retain(|(name, _)| name == text);
        }
        match meant.as_slice() {
            [(name, device)] => Ok((name.clone(), device.clone())),
            _ if list.is_empty() => Err(
                "no device is driven by this process: only volumes of nvme:// and vfio-user:// stand on one".into(),
            ),
            _ => {
                let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
                Err(format!(
                    "{} devices are called \"{text}\"; there are: {}",
                    meant.len(),
                    names.join(", ")
                ))
            }
        }
    }
}
