//! Namespaces of an engine: by index, which outstanding commands and the control half use, and by
//! NSID.

use super::Namespace;
use super::attach::Detached;
use super::commands::NamespaceType;
use crate::marks::MarkTable;
use crate::metadata::MetadataState;
use crate::zoned::ZonedState;
use nvme::Status;
use protection::Layout;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Value that stands for no namespace in a table of namespace indices by NSID.
pub(super) const NO_NAMESPACE: u16 = u16::MAX;

/// Namespaces of an engine, and the access of its host to them.
pub(crate) struct NamespaceTable {
    pub(super) list: Vec<Namespace>,
    /// Index in `list` of each NSID's namespace, or [`NO_NAMESPACE`].
    pub(super) all: Vec<u16>,
    /// Index in `list` of each NSID's namespace that the fast path may use, because it restricts no
    /// command; otherwise [`NO_NAMESPACE`].
    pub(super) open: Vec<u16>,
    /// Whether any namespace is closed to hosts, or has a format that the host has not enabled.
    pub(super) any_closed: bool,
    /// Whether any namespace has placement handles (Flexible Data Placement).
    pub(super) any_placed: bool,
    /// Whether the host has enabled extended protection information formats (Host Behavior Support,
    /// LBAFEE).
    pub(super) lbafee: bool,
    /// Blocks that Write Uncorrectable has marked, by NSID.
    pub(super) marks: Arc<MarkTable>,
    /// Namespace index and tag of each outstanding command that a change of access rights waits
    /// for.
    pub(super) fences: Vec<(usize, u64)>,
    /// Detached namespaces with volumes that are still open.
    pub(super) detached: Vec<Detached>,
}

/// Entries by index, including vacant and detached ones.
impl Deref for NamespaceTable {
    type Target = Vec<Namespace>;

    #[inline(always)]
    fn deref(&self) -> &Vec<Namespace> {
        &self.list
    }
}

impl DerefMut for NamespaceTable {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Vec<Namespace> {
        &mut self.list
    }
}

impl NamespaceTable {
    /// Creates a table of these namespaces; `max` is the largest valid NSID.
    pub fn new(list: Vec<Namespace>, max: u32, marks: Arc<MarkTable>) -> Self {
        let mut all = vec![NO_NAMESPACE; max as usize + 1];
        for (i, ns) in list.iter().enumerate() {
            if !ns.is_vacant()
                && let Some(slot) = all.get_mut(ns.config.nsid as usize)
            {
                *slot = i as u16;
            }
        }
        let mut table = NamespaceTable {
            open: all.clone(),
            all,
            any_closed: false,
            any_placed: false,
            lbafee: false,
            marks,
            fences: Vec::new(),
            detached: Vec::new(),
            list,
        };
        (0..table.len()).for_each(|index| table.find_marks(index));
        table.index_namespaces();
        table
    }

    /// Returns the index of an attached namespace.
    ///
    /// # Errors
    /// Invalid Field when no namespace has this NSID, Invalid Namespace when none can have it
    /// ("NVMe Base 2.1", 3.2.1.2 to 3.2.1.4).
    pub fn index_of(&self, nsid: u32) -> Result<usize, Status> {
        match self.all.get(nsid as usize) {
            Some(index) if *index != NO_NAMESPACE => Ok(usize::from(*index)),
            Some(_) if nsid != 0 => Err(Status::INVALID_FIELD.with_dnr(true)),
            _ => Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true)),
        }
    }

    /// Returns the attached namespace with this NSID.
    pub fn of_nsid(&self, nsid: u32) -> Option<&Namespace> {
        self.get(self.index_of(nsid).ok()?)
    }

    /// Returns the namespace that the fast path may use for commands with this NSID, with its
    /// index.
    #[inline(always)]
    pub(super) fn open_of(&mut self, nsid: u32) -> Option<(u16, &mut Namespace)> {
        // An NSID without a namespace has no index, see `NO_NAMESPACE`.
        let index = self.open.get(nsid as usize).copied()?;
        let ns = self.list.get_mut(usize::from(index))?;
        Some((index, ns))
    }

    /// Returns the attached namespaces, which commands find.
    pub fn active(&self) -> impl Iterator<Item = &Namespace> {
        let finds = |(index, ns): &(usize, &Namespace)| {
            let found = self.all.get(ns.config.nsid as usize);
            found.is_some_and(|found| usize::from(*found) == *index)
        };
        self.iter().enumerate().filter(finds).map(|(_, ns)| ns)
    }

    /// Returns the kind of the namespace with this NSID, which selects the handlers of its
    /// commands.
    pub(super) fn sort_of(&self, nsid: u32) -> NamespaceType {
        self.of_nsid(nsid)
            .map_or(NamespaceType::Plain, Namespace::sort)
    }

    pub(super) fn metadata_of(&self, index: usize) -> Option<Arc<MetadataState>> {
        self.get(index)?.config.metadata.clone()
    }

    /// Returns the metadata layout of a namespace.
    pub(super) fn layout_of(&self, index: usize) -> Option<Layout> {
        let state = self.get(index)?.config.metadata.as_deref()?;
        Some(*state.layout())
    }

    pub(super) fn zones_of(&self, index: usize) -> Result<Arc<ZonedState>, Status> {
        let zones = self.get(index).and_then(|ns| ns.config.zones.clone());
        zones.ok_or(Status::INVALID_OPCODE.with_dnr(true))
    }

    /// Asks the volume to end the command with this tag early.
    pub(super) fn cancel(&mut self, index: usize, tag: u64) {
        if let Some(ns) = self.get_mut(index) {
            ns.queue.cancel(tag);
            if let Some(passthrough) = &mut ns.passthrough {
                passthrough.abort(tag);
            }
        }
    }
}
