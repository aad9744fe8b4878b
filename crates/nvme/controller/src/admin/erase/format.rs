//! Format NVM, and the change of a namespace's format by it: block size and metadata.
//!
//! A namespace that can have several formats has a [`FormatStore`](crate::FormatStore). The store
//! receives the new format after all blocks are erased, and before the namespace uses the format. A
//! crash before that leaves the old format on partly erased blocks; a crash after it leaves the new
//! format on erased blocks. The next process reads the format from the store. If it continues the
//! command, it erases and stores again, with the same result. Once a format may have been stored, a
//! reset does not abort the command, because the namespace must have the format that the next
//! process finds.
//!
//! If the store cannot determine which format the next process will find, the namespace stays
//! closed: its commands end with Namespace Not Ready, even after a reset. The namespace opens when
//! another format is stored, or in the next process, which reads the store.
//!
//! The engines apply the format while the namespace is closed and has no outstanding command.

use super::{Cause, EraseOperation, Erasure, Stage};
use crate::admin::{AdminOutcome, AdminResult, INVALID_FIELD};
use crate::control::Controller;
use crate::engine::{Namespace, Order};
use crate::formats::{BlockFormat, Formats, SavedFormat};
use crate::metadata::MetadataState;
use crate::pool::PooledNamespace;
use crate::subsystem::Erasing;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{FormatCdw10, SecureErase};
use nvme::identify::Flbas;
use nvme::{Command, Status};
use protection::Type;
use std::sync::Arc;

const INVALID_FORMAT: Status = Status::INVALID_FORMAT.with_dnr(true);

/// Returns the format that a Format NVM command requests. MSET is ignored for blocks without
/// metadata, and PIL without protection information.
///
/// # Errors
/// Invalid Format when the namespace cannot have the format ("NVMe Base 2.1", 5.1.10; "NVM Command
/// Set 1.1", 4.1.2). Invalid Field in Command when the type of protection information is reserved.
fn chosen(cdw10: FormatCdw10, ns: &Namespace) -> Result<BlockFormat, Status> {
    let config = &ns.config;
    let formats = config.lba_formats();
    let found = formats.get(usize::from(cdw10.lbaf())).copied().flatten();
    let found = found.ok_or(INVALID_FORMAT)?;
    let protection = match cdw10.pi() {
        0 => None,
        number => {
            let kind = Type::of(number).ok_or(INVALID_FIELD)?;
            Some((kind, cdw10.pil()))
        }
    };
    let chosen = BlockFormat {
        extended: found.metadata > 0 && cdw10.mset(),
        protection,
        ..found
    };
    chosen.check().map_err(|_| INVALID_FORMAT)?;
    let formats = config.formats.as_ref();
    let free = chosen.metadata == 0 || formats.is_some_and(Formats::has_metadata);
    if free || chosen == config.format() {
        Ok(chosen)
    } else {
        Err(INVALID_FORMAT)
    }
}

impl EraseOperation {
    /// Returns whether the operation has reached the stages in which it stores new formats. From
    /// then on the stored format may already be the new one.
    pub(super) fn may_be_kept(&self) -> bool {
        let keeps = matches!(
            self.stage,
            Stage::Keep | Stage::Keeping(_) | Stage::Done | Stage::Over | Stage::Opening(_)
        );
        keeps && !self.changes.is_empty()
    }

    /// Returns the stage after a finished erasure or a stored format: the next format to store, or
    /// the end.
    pub(super) fn keeps_next(&self) -> Stage {
        if self.failed.is_none() && self.kept < self.changes.len() {
            Stage::Keep
        } else {
            Stage::Done
        }
    }
}

impl Erasure {
    /// Returns the status of commands for a namespace that is not being erased, if it is closed;
    /// `None` when it is open.
    pub(crate) fn at_rest(&self, nsid: u32) -> Option<Status> {
        self.unknown.contains(&nsid).then_some(Erasing::UNKNOWN)
    }

    /// Sets whether the stored format of a shared namespace is unknown, as another controller
    /// reports.
    pub(crate) fn set_unknown(&mut self, nsid: u32, unknown: bool) {
        self.unknown.retain(|other| *other != nsid);
        if unknown {
            self.unknown.push(nsid);
        }
    }

    /// Forgets a namespace that is detached, because another one may use its ID later.
    pub(crate) fn forget(&mut self, nsid: u32) {
        self.unknown.retain(|unknown| *unknown != nsid);
    }
}

impl Controller {
    pub(in crate::admin) fn format_nvm(&mut self, command: &Command) -> AdminResult {
        let cdw10 = FormatCdw10::from_bits(command.cdw10.get());
        let nsid = command.nsid.get();
        let nsids: Vec<u32> = match nsid {
            NSID_BROADCAST => self.active().map(|ns| ns.config.nsid).collect(),
            nsid => {
                self.engine.namespaces.index_of(nsid)?;
                vec![nsid]
            }
        };
        for nsid in &nsids {
            self.may_erase(*nsid)?;
        }
        let mut changes = Vec::new();
        let all = self.active();
        for ns in all.filter(|ns| nsids.contains(&ns.config.nsid)) {
            let format = chosen(cdw10, ns)?;
            let extended = ns.has_extended_format() || format.is_extended();
            // See "NVM Command Set 1.1", 4.1.3.6.1.
            if extended && !self.admin.features.lbafee() {
                return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true));
            }
            // If the stored format is unknown, any format is a change.
            let known = self.admin.erasure.at_rest(ns.config.nsid).is_none();
            if format != ns.config.format() || !known {
                changes.push((ns.config.nsid, format));
            }
        }
        if nsids.is_empty() && cdw10.lbaf() != 0 {
            return Err(INVALID_FORMAT);
        }
        if !matches!(cdw10.ses(), SecureErase::NONE | SecureErase::USER_DATA) {
            return Err(INVALID_FIELD);
        }
        self.begin_erasing(EraseOperation {
            changes,
            ..EraseOperation::new(Cause::Format(command.cid.get()), nsids)
        })?;
        self.record_format_start(nsid, command.cdw10.get());
        Ok(AdminOutcome::Later)
    }

    /// Stores the present format again, with a new metadata file, for namespaces with a truncated
    /// metadata file.
    pub(super) fn renew_lost(&mut self) {
        let Some(running) = &mut self.admin.erasure.running else {
            return;
        };
        let Cause::Format(_) = running.cause else {
            return;
        };
        for ns in self
            .engine
            .namespaces
            .active()
            .filter(|ns| ns.loses_table())
        {
            let (nsid, format) = (ns.config.nsid, ns.config.format());
            let changes = &mut running.changes;
            if running.nsids.contains(&nsid) && changes.iter().all(|change| change.0 != nsid) {
                changes.push((nsid, format));
            }
        }
    }

    /// Returns whether the pool is making no other change, so that a format may be stored.
    pub(super) fn may_keep(&self) -> bool {
        !self.admin.management.is_running()
    }

    /// Stores the next change of a format after the erasure is durable. Returns whether there was
    /// anything to do.
    pub(super) fn keep_format(&mut self) -> bool {
        let may_keep = self.may_keep();
        let next = self.admin.erasure.running.as_ref();
        let next = next.and_then(|running| running.changes.get(running.kept));
        let mine = next.is_none_or(|(nsid, _)| self.may_still_erase(*nsid));
        let erasure = &mut self.admin.erasure;
        let Some(running) = erasure.running.as_mut().filter(|_| may_keep) else {
            return false;
        };
        let Some(&(nsid, format)) = running.changes.get(running.kept) else {
            running.stage = Stage::Done;
            return true;
        };
        let ns = self.engine.namespaces.of_nsid(nsid);
        // A namespace that was attached in place of the closed one keeps its format.
        let ns = ns.filter(|ns| ns.closed == Some(running.cause.closes_with()) && mine);
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
        self.tell_of_keeping(nsid);
        crash::point!("controller.format.before");
        store.save(format, Box::new(done));
        crash::point!("controller.format.saved");
        true
    }

    /// Handles the answer of the format store, if it has arrived. Returns whether it has.
    pub(super) fn format_kept(&mut self, number: u64) -> bool {
        let erasure = &mut self.admin.erasure;
        let Some(kept) = erasure.answers.take(number) else {
            return false;
        };
        let Some(running) = &mut erasure.running else {
            return false;
        };
        let Some(&(nsid, format)) = running.changes.get(running.kept) else {
            running.stage = Stage::Done;
            return true;
        };
        let mut all = self.engine.namespaces.active();
        let closed = Some(running.cause.closes_with());
        // A namespace that was attached in place of the closed one keeps its format.
        let ours = all.any(|ns| ns.config.nsid == nsid && ns.closed == closed);
        match kept {
            SavedFormat::New(kept)
                if kept.metadata.as_ref().map(|found| *found.layout()) == format.layout() =>
            {
                running.metadata.push(kept.metadata);
                running.kept += 1;
                running.stage = running.keeps_next();
                if ours {
                    erasure.unknown.retain(|unknown| *unknown != nsid);
                }
            }
            SavedFormat::Before => running.fail(Status::INTERNAL_ERROR),
            SavedFormat::New(_) | SavedFormat::Unknown => {
                if let Some(left_out) = self.engine.settings.log.allow("unknown format") {
                    tracing::error!(
                        nsid,
                        ?format,
                        left_out,
                        "the stored LBA format is unknown: the namespace is closed until one is \
                         stored"
                    );
                }
                running.fail(Status::INTERNAL_ERROR);
                if ours && !erasure.unknown.contains(&nsid) {
                    erasure.unknown.push(nsid);
                }
            }
        }
        true
    }

    /// Applies the stored formats, and opens the namespaces, after the end of the operation is
    /// committed. The command completes when all engines have applied that.
    pub(super) fn open_formatted(&mut self) {
        let Some(running) = &self.admin.erasure.running else {
            return;
        };
        let nsids = running.nsids.clone();
        // Formats stored by the previous process are part of this process's configuration.
        let metadata = running.metadata.iter().cloned().map(Some);
        let metadata = metadata.chain(std::iter::repeat(None));
        let changes = running.changes.iter().copied().take(running.kept);
        let changes: Vec<_> = changes.zip(metadata).collect();
        let closed = Some(running.cause.closes_with());
        if running.failed.is_none() {
            self.unmark_all(&nsids);
        }
        for ((nsid, format), metadata) in changes {
            if !self.may_still_erase(nsid) {
                continue;
            }
            // The marked blocks no longer exist, even if the format of another namespace has
            // failed.
            self.unmark_all(&[nsid]);
            self.reformat(nsid, format, metadata, closed);
        }
        let others = self.open_erased(&nsids);
        crash::point!("controller.format.open");
        let orders = self.migration.orders();
        let known = self.migration.has_applied(&orders) && others.strong_count() == 0;
        if let Some(running) = &mut self.admin.erasure.running {
            running.stage = Stage::Opening(orders);
            running.others = others;
        }
        self.migration.wait();
        self.touch();
        if known {
            self.end_erasing();
        }
    }

    /// Sets the format and the metadata of a closed namespace. `None` keeps the present metadata.
    pub(crate) fn reformat(
        &mut self,
        nsid: u32,
        format: BlockFormat,
        metadata: Option<Option<Arc<MetadataState>>>,
        closed: Option<Status>,
    ) {
        let Ok(index) = self.engine.namespaces.index_of(nsid) else {
            return;
        };
        let Some(ns) = self.engine.namespaces.get(index) else {
            return;
        };
        if ns.closed != closed {
            return;
        }
        let metadata = metadata.unwrap_or_else(|| ns.config.metadata.clone());
        let found = metadata.as_ref().map(|metadata| *metadata.layout());
        if found != format.layout() {
            if let Some(left_out) = self.engine.settings.log.allow("other metadata") {
                tracing::error!(
                    nsid,
                    ?format,
                    ?found,
                    left_out,
                    "the metadata does not match the LBA format"
                );
            }
            return;
        }
        let blocks = ns.config.volume.info().size >> format.block.trailing_zeros();
        let fixed = metadata.as_ref().map(|metadata| metadata.blocks());
        let blocks = fixed.map_or(blocks, |fixed| fixed.min(blocks));
        if let Some(left_out) = self.engine.settings.log.allow("formatted") {
            tracing::info!(nsid, ?format, blocks, left_out, "formatted");
        }
        self.order_all(|| Order::Reformatted {
            index,
            format,
            metadata: metadata.clone(),
            blocks,
        });
        if let Some(ns) = self.engine.namespaces.get(index) {
            self.migration.set_namespace(index, ns.config.clone());
        }
        self.tell_changed(nsid);
    }

    /// Returns the Formatted LBA Size (FLBAS) of a namespace in the pool.
    pub(in crate::admin) fn flbas_of(&self, namespace: &PooledNamespace) -> Flbas {
        let pool = self.config.pool.as_ref();
        let first = pool.is_none_or(|pool| pool.block_size() == namespace.block_size);
        Flbas::for_format(u8::from(!first))
    }
}
