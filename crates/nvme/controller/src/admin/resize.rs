//! Detection of size changes of volumes.

use crate::control::Controller;
use crate::engine::Order;
use nvme::aen::{AsyncEvent, Notice};
use nvme::feature::AsyncEventConfig;
use nvme::log::Lid;

impl Controller {
    /// Applies the present sizes of the volumes. Later commands are checked against them, and the
    /// host is notified if enabled ("NVMe Base 2.1", 5.1.2.1, Attached Namespace Attribute
    /// Changed). Returns whether any size has changed. The sizes have to be updated before by
    /// [`volume::Volume::refresh`], on another thread because it may block.
    pub fn check_sizes(&mut self) -> bool {
        let _disk = self.in_log();
        let mut changed = false;
        for index in 0..self.engine.namespaces.len() {
            let Some(ns) = self.engine.namespaces.get(index) else {
                break;
            };
            // The number of blocks of such a namespace cannot change.
            if ns.is_fixed() {
                continue;
            }
            let nsid = ns.config.nsid;
            let blocks = ns.config.volume.info().size >> ns.shift;
            if blocks == ns.blocks {
                continue;
            }
            if let Some(left_out) = self.engine.settings.log.allow("resized") {
                tracing::info!(nsid, before = ns.blocks, blocks, left_out, "resized");
            }
            self.order_all(|| Order::Resized { index, blocks });
            self.cut_marks(nsid, blocks);
            self.tell_changed(nsid);
            changed = true;
        }
        self.settle();
        changed
    }

    /// Notifies the host of a changed, attached or detached namespace, if enabled.
    pub(crate) fn tell_changed(&mut self, nsid: u32) {
        self.touch();
        self.admin.logs.changed(nsid);
        let wanted = AsyncEventConfig::from_bits(self.admin.features.event_config).nan();
        if wanted {
            self.notify(AsyncEvent::notice(
                Notice::NAMESPACE_ATTRIBUTE_CHANGED,
                Lid::CHANGED_NAMESPACE_LIST,
            ));
        }
    }
}
