//! Configurations of controllers, as far as options define them.

use crate::options::Size;
use crate::spec::{ControllerSpec, DoorbellMode, NvmeTcpSpec};
use controller::{Cloud, ControllerConfig};

/// Returns the configuration of a controller, as far as it does not depend on the volumes.
pub fn controller(spec: &ControllerSpec, serial: String) -> ControllerConfig {
    let default = ControllerConfig::default();
    let cloud = spec.cloud.as_ref();
    let model = cloud.map_or(default.model, |cloud| cloud.model().into());
    ControllerConfig {
        name: spec.any_name(),
        model: spec.model.clone().unwrap_or(model),
        pci: cloud.map_or(default.pci, Cloud::pci),
        cloud: spec.cloud.clone(),
        firmware: spec.firmware.clone().unwrap_or(default.firmware),
        subnqn: spec.subnqn.clone(),
        serial,
        cntlid: spec.cntlid.unwrap_or(default.cntlid),
        io_queues: spec.io_queues.unwrap_or(default.io_queues),
        queue_entries: spec.queue_entries.unwrap_or(default.queue_entries),
        mdts: spec.mdts.unwrap_or(default.mdts),
        mapped_doorbells: spec.doorbells == Some(DoorbellMode::Mapped),
        shadow_doorbells: spec.shadow_doorbells.unwrap_or(default.shadow_doorbells),
        cmb_size: spec.cmb_size.map(|Size(bytes)| bytes),
        write_cache: spec.write_cache.unwrap_or(default.write_cache),
        ..ControllerConfig::default()
    }
}

/// Returns the controller configuration of an NVMe/TCP subsystem for other hosts.
pub fn target_controller(spec: &NvmeTcpSpec, serial: String) -> ControllerConfig {
    let default = ControllerConfig::default();
    ControllerConfig {
        name: spec.any_name(),
        model: spec.model.clone().unwrap_or(default.model),
        firmware: spec.firmware.clone().unwrap_or(default.firmware),
        serial,
        mdts: spec.mdts.unwrap_or(default.mdts),
        write_cache: spec.write_cache.unwrap_or(default.write_cache),
        ..ControllerConfig::default()
    }
}
