//! Connections of a queue by path, and the choice of one for each command.

use super::link::Link;
use crate::options::Policy;
use crate::path::Path;
use nvme::log::AnaState;

/// Connections of one queue on all paths, from which one is chosen for each command.
pub(super) struct Routes {
    /// Connections of the first path, then of the second, and so on; each path has equally many.
    links: Vec<Link>,
    each: usize,
    policy: Policy,
    /// Index of the path after the one that was chosen last.
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
    pub(super) fn new(paths: usize, each: usize, policy: Policy) -> Self {
        Self {
            links: (0..paths * each).map(|_| Link::new()).collect(),
            each,
            policy,
            turn: 0,
        }
    }

    /// Returns the number of connections on each path.
    pub(super) fn each(&self) -> usize {
        self.each
    }

    pub(super) fn link(&mut self, path: usize, number: usize) -> Option<&mut Link> {
        let number = (number < self.each).then_some(number)?;
        self.links
            .get_mut(path.checked_mul(self.each)?.checked_add(number)?)
    }

    /// Returns the connections on the path with this index.
    pub(super) fn links(&mut self, path: usize) -> impl Iterator<Item = &mut Link> {
        let skip = path.saturating_mul(self.each);
        self.links.iter_mut().skip(skip).take(self.each)
    }

    /// Returns all connections, each with the index of its path.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (usize, &mut Link)> {
        let each = self.each.max(1);
        let links = self.links.iter_mut().enumerate();
        links.map(move |(place, link)| (place / each, link))
    }

    /// Returns the best rank (by ANA state) among the paths that have an open connection.
    fn best(&self, paths: &[Path]) -> Option<u8> {
        let links = self.links.chunks(self.each.max(1)).zip(paths);
        let usable = links.filter(|(links, _)| links.iter().any(Link::is_open));
        usable.filter_map(|(_, path)| rank(path)).min()
    }

    /// Returns whether any path is usable, even if it has no room at present.
    pub(super) fn is_usable(&self, paths: &[Path]) -> bool {
        self.best(paths).is_some()
    }

    /// Returns whether any usable path has room for another command.
    pub(super) fn has_room(&self, paths: &[Path]) -> bool {
        let best = self.best(paths);
        let links = self.links.chunks(self.each.max(1)).zip(paths);
        best.is_some()
            && links
                .filter(|(_, path)| rank(path) == best)
                .any(|(links, _)| links.iter().any(Link::has_room))
    }

    /// Chooses the connection for the next command by the policy, among the paths with the best ANA
    /// state; `None` if no path is usable or has room.
    pub(super) fn choose(&mut self, paths: &[Path]) -> Option<&mut Link> {
        let place = match &self.links[..] {
            // The most common case is one connection.
            [only] => (only.has_room() && rank(paths.first()?).is_some()).then_some(0)?,
            _ => self.choose_among(paths)?,
        };
        self.links.get_mut(place)
    }

    fn choose_among(&mut self, paths: &[Path]) -> Option<usize> {
        let best = self.best(paths)?;
        let (each, count, turn) = (self.each.max(1), self.links.len(), self.turn);
        // Try the connections in turn, starting after the last one chosen.
        let places = (0..count).map(|step| (turn + step) % count.max(1));
        let open = places.filter(|place| {
            let link = self.links.get(*place);
            let path = paths.get(place / each);
            link.is_some_and(Link::has_room) && path.and_then(rank) == Some(best)
        });
        let len = |place: &usize| self.links.get(*place).map_or(usize::MAX, Link::len);
        let mut open = open;
        let place = match self.policy {
            Policy::RoundRobin => open.next(),
            Policy::QueueDepth => open.min_by_key(len),
        }?;
        self.turn = (place + 1) % count.max(1);
        Some(place)
    }

    /// Returns whether a connection of the association `epoch` is open or closing.
    pub(super) fn has_epoch(&self, path: usize, epoch: u64) -> bool {
        let links = self.links.iter().skip(path.saturating_mul(self.each));
        let mut links = links.take(self.each);
        links.any(|link| link.identity().is_some_and(|(of, _)| of == epoch))
    }

    pub(super) fn has_news(&self) -> bool {
        self.links.iter().any(Link::has_news)
    }

    pub(super) fn is_timed(&self) -> bool {
        self.links.iter().any(Link::is_timed)
    }
}
