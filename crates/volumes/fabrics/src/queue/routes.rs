//! Choice of a connection for each command, among the connections of a queue on all paths.

use super::session::FabricsSession;
use crate::options::Policy;
use crate::path::Path;
use nvme::log::AnaState;

type Link = remote::queue::Link<FabricsSession>;

/// Layout of a queue's connections, and the policy by which one is chosen for each command. The
/// connections are those of the first path, then of the second, and so on.
pub(super) struct Routes {
    /// Number of connections on each path.
    each: usize,
    policy: Policy,
    /// Index of the connection after the one that was chosen last.
    turn: usize,
}

/// Returns the rank of a path by its ANA state (lower is better); `None` if it is unusable.
fn rank(path: &Path) -> Option<u8> {
    match path.state() {
        AnaState::OPTIMIZED => Some(0),
        AnaState::NON_OPTIMIZED => Some(1),
        _ => None,
    }
}

impl Routes {
    pub(super) fn new(each: usize, policy: Policy) -> Self {
        let each = each.max(1);
        Self {
            each,
            policy,
            turn: 0,
        }
    }

    /// Returns the index of the path of connection `number`.
    pub(super) fn path(&self, number: usize) -> usize {
        number / self.each
    }

    /// Returns the number of a connection on a path.
    pub(super) fn number(&self, path: usize, link: usize) -> usize {
        path.saturating_mul(self.each).saturating_add(link)
    }

    /// Returns the connections on the path with this index.
    pub(super) fn links<'a>(
        &self,
        path: usize,
        links: &'a mut [Link],
    ) -> impl Iterator<Item = &'a mut Link> + use<'a> {
        let skip = self.number(path, 0);
        links.iter_mut().skip(skip).take(self.each)
    }

    /// Returns the best rank (by ANA state) among the paths that have an open connection.
    fn best(&self, links: &[Link], paths: &[Path]) -> Option<u8> {
        let links = links.chunks(self.each).zip(paths);
        let usable = links.filter(|(links, _)| links.iter().any(Link::is_open));
        usable.filter_map(|(_, path)| rank(path)).min()
    }

    /// Returns whether any path is usable, even if it has no room at present.
    pub(super) fn is_usable(&self, links: &[Link], paths: &[Path]) -> bool {
        self.best(links, paths).is_some()
    }

    /// Returns whether any usable path has room for another command.
    pub(super) fn has_room(&self, links: &[Link], paths: &[Path]) -> bool {
        let best = self.best(links, paths);
        let links = links.chunks(self.each).zip(paths);
        best.is_some()
            && links
                .filter(|(_, path)| rank(path) == best)
                .any(|(links, _)| links.iter().any(Link::has_room))
    }

    /// Chooses the connection for the next command by the policy, among the paths with the best ANA
    /// state; `None` if no path is usable or has room.
    pub(super) fn choose(&mut self, links: &[Link], paths: &[Path]) -> Option<usize> {
        // The most common case is one connection.
        if let [only] = links {
            return (only.has_room() && rank(paths.first()?).is_some()).then_some(0);
        }
        let best = self.best(links, paths)?;
        let (count, turn) = (links.len(), self.turn);
        // Try the connections in turn, starting after the last one chosen.
        let places = (0..count).map(|step| (turn + step) % count.max(1));
        let mut open = places.filter(|place| {
            let path = paths.get(self.path(*place));
            links.get(*place).is_some_and(Link::has_room) && path.and_then(rank) == Some(best)
        });
        let len = |place: &usize| links.get(*place).map_or(usize::MAX, Link::outstanding);
        let place = match self.policy {
            Policy::RoundRobin => open.next(),
            Policy::QueueDepth => open.min_by_key(len),
        }?;
        self.turn = (place + 1) % count.max(1);
        Some(place)
    }
}
