//! Format NVM, and what it changes of a namespace: the size of its blocks.
//!
//! A namespace that can have several formats has a [`FormatStore`](crate::FormatStore), which
//! stores the new format when everything is erased, and before the namespace uses it. A process
//! that dies before leaves the old format on blocks that are erased in part; one that dies later
//! leaves the new format on erased blocks. The next process reads from the store which of them it
//! is; where it continues the command, it erases and stores again, with the same result. Once a
//! format may have been stored, a reset does not abort the command: the namespace must have the
//! format that the next process finds.
//!
//! The engines learn of it while the namespace is closed, and nothing is in flight on it.

use super::{Cause, Running, Stage};
use crate::admin::{AdminResult, INVALID_FIELD, Outcome};
use crate::controller::Controller;
use crate::engine::{Namespace, Order};
use crate::metadata::MetadataState;
use crate::pool::PooledNamespace;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{FormatCdw10, SecureErase};
use nvme::identify::Flbas;
use nvme::{Command, Status};
use std::sync::Arc;

/// The namespace has its metadata so, and that protection.
fn has_metadata_so(cdw10: FormatCdw10, ns: &Namespace) -> bool {
    let layout = ns.config.metadata.as_deref().map(MetadataState::layout);
    let protection = layout.and_then(|layout| layout.protection);
    let place = layout.is_none_or(|layout| layout.extended == cdw10.mset());
    place
        && match protection {
            None => cdw10.pi() == 0,
            Some(found) => cdw10.pi() == found.kind as u8 && cdw10.pil() == found.first,
        }
}

/// Bytes of a block of the format that is asked for; `None`: the namespace cannot have it.
fn block_size(cdw10: FormatCdw10, ns: &Namespace) -> Option<u32> {
    let formats = ns.config.lba_formats();
    let found = formats.get(usize::from(cdw10.lbaf())).copied().flatten();
    found.filter(|_| has_metadata_so(cdw10, ns))
}

impl Running {
    /// A change may be kept already, or is by now.
    pub(super) fn may_be_kept(&self) -> bool {
        let keeps = matches!(
            self.stage,
            Stage::Keep | Stage::Keeping(_) | Stage::Done | Stage::Over | Stage::Opening(_)
        );
        keeps && !self.changes.is_empty()
    }

    /// What follows when all is erased, or a change is kept.
    pub(super) fn keeps_next(&self) -> Stage {
        match self.failed.is_none() && self.kept < self.changes.len() {
            true => Stage::Keep,
            false => Stage::Done,
        }
    }
}

impl Controller {
    pub(in crate::admin) fn format_nvm(&mut self, command: &Command) -> AdminResult {
        let cdw10 = FormatCdw10::from_bits(command.cdw10.get());
        let nsid = command.nsid.get();
        let nsids: Vec<u32> = match nsid {
            NSID_BROADCAST => self.engine.active().map(|ns| ns.config.nsid).collect(),
            nsid => {
                self.engine.namespace_index(nsid)?;
                vec![nsid]
            }
        };
        let mut changes = Vec::new();
        let all = self.engine.active();
        for ns in all.filter(|ns| nsids.contains(&ns.config.nsid)) {
            // ("NVM Command Set 1.1", 4.1.3.6.1)
            if ns.has_extended_format() && !self.admin.features.lbafee() {
                return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true));
            }
            let size = block_size(cdw10, ns).ok_or(Status::INVALID_FORMAT.with_dnr(true))?;
            if size != ns.config.block_size {
                changes.push((ns.config.nsid, size));
            }
        }
        if nsids.is_empty() && cdw10.lbaf() != 0 {
            return Err(Status::INVALID_FORMAT.with_dnr(true));
        }
        if !matches!(cdw10.ses(), SecureErase::NONE | SecureErase::USER_DATA) {
            return Err(INVALID_FIELD);
        }
        self.begin_erasing(Running {
            changes,
            ..Running::new(Cause::Format(command.cid.get()), nsids)
        })?;
        self.record_format_start(nsid, command.cdw10.get());
        Ok(Outcome::Later)
    }

    /// No other change of the pool is in flight.
    pub(super) fn may_keep(&self) -> bool {
        !self.admin.management.is_running()
    }

    /// All is erased, and that is durable: has the next change kept.
    pub(super) fn keep_format(&mut self) -> bool {
        let may_keep = self.may_keep();
        let erasure = &mut self.admin.erasure;
        let Some(running) = erasure.running.as_mut().filter(|_| may_keep) else {
            return false;
        };
        let Some(&(nsid, size)) = running.changes.get(running.kept) else {
            running.stage = Stage::Done;
            return true;
        };
        let index = self.engine.namespace_index(nsid).ok();
        let ns = index.and_then(|index| self.engine.namespaces.get(index));
        // Not of one that has come in its place.
        let ns = ns.filter(|ns| ns.closed == Some(running.cause.closes_with()));
        let formats = ns.and_then(|ns| ns.config.formats.as_ref());
        let Some(store) = formats.map(|formats| formats.store().clone()) else {
            running.fail(Status::INVALID_NAMESPACE_OR_FORMAT);
            return true;
        };
        erasure.number += 1;
        let number = erasure.number;
        running.stage = Stage::Keeping(number);
        let answers = Arc::downgrade(&erasure.answers);
        let done = move |kept| {
            if let Some(answers) = answers.upgrade() {
                answers.leave(number, kept);
            }
        };
        crash::point!("controller.format.before");
        store.save(size, Box::new(done));
        crash::point!("controller.format.saved");
        true
    }

    /// A change is kept, or could not be; or there is no answer yet.
    pub(super) fn format_kept(&mut self, number: u64) -> bool {
        let erasure = &mut self.admin.erasure;
        let Some(kept) = erasure.answers.take(number) else {
            return false;
        };
        let Some(running) = &mut erasure.running else {
            return false;
        };
        match kept {
            true => {
                running.kept += 1;
                running.stage = running.keeps_next();
            }
            // What was kept before it counts.
            false => running.fail(Status::INTERNAL_ERROR),
        }
        true
    }

    /// It is over, and that is committed: what is kept counts, and the namespaces are open. The
    /// host is told when all engines know that.
    pub(super) fn open_formatted(&mut self) {
        let Some(running) = &self.admin.erasure.running else {
            return;
        };
        let nsids = running.nsids.clone();
        let changes: Vec<(u32, u32)> = running.changes.iter().copied().take(running.kept).collect();
        let closed = Some(running.cause.closes_with());
        if running.failed.is_none() {
            self.unmark_all(&nsids);
        }
        for (nsid, size) in changes {
            // Marks are of blocks that there are no more, also where another namespace failed.
            self.unmark_all(&[nsid]);
            self.reformat(nsid, size, closed);
        }
        self.close(&nsids, None);
        crash::point!("controller.format.open");
        let orders = self.migration.orders();
        let known = self.migration.has_applied(&orders);
        if let Some(running) = &mut self.admin.erasure.running {
            running.stage = Stage::Opening(orders);
        }
        self.migration.wait();
        self.touch();
        if known {
            self.end_erasing();
        }
    }

    /// A namespace that is closed so has blocks of so many bytes from now on.
    fn reformat(&mut self, nsid: u32, block_size: u32, closed: Option<Status>) {
        let Ok(index) = self.engine.namespace_index(nsid) else {
            return;
        };
        let Some(ns) = self.engine.namespaces.get(index) else {
            return;
        };
        if ns.closed != closed {
            return;
        }
        let blocks = ns.config.volume.info().size >> block_size.trailing_zeros();
        tracing::info!(nsid, block_size, blocks, "formatted");
        self.order_all(|| Order::Reformatted {
            index,
            block_size,
            blocks,
        });
        if let Some(ns) = self.engine.namespaces.get(index) {
            self.migration.set_namespace(index, ns.config.clone());
        }
        self.tell_changed(nsid);
    }

    /// FLBAS of a namespace of the pool.
    pub(in crate::admin) fn flbas_of(&self, namespace: &PooledNamespace) -> Flbas {
        let pool = self.config.pool.as_ref();
        let first = pool.is_none_or(|pool| pool.block_size() == namespace.block_size);
        Flbas::for_format(u8::from(!first))
    }
}
