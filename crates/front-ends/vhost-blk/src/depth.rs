//! Estimate of the client's queue depth, which decides how often the used index is published.

/// Number of fetches for which an estimate holds.
const FETCHES: u16 = 64;

/// Maximum number of requests that the client had outstanding at a recent fetch.
///
/// The number of waiting requests alone says little: a client that is slower than the export has
/// few of them waiting, however many it keeps outstanding.
#[derive(Debug, Default)]
pub(crate) struct ClientDepth {
    /// Maximum since `fetches` began to count.
    most: u16,
    /// Maximum of the [`FETCHES`] fetches before.
    before: u16,
    fetches: u16,
}

impl ClientDepth {
    /// Records the number of requests that are outstanding from the client's point of view at a
    /// fetch.
    #[inline]
    pub(crate) fn see(&mut self, outstanding: u16) {
        if self.fetches == FETCHES {
            self.fetches = 0;
            self.before = std::mem::take(&mut self.most);
        }
        self.fetches += 1;
        self.most = self.most.max(outstanding);
    }

    /// Returns the number of used entries to publish together.
    ///
    /// A client with few outstanding requests has nothing to do until it sees the first one end, so
    /// each entry is published at once. A client with many works on while entries are collected,
    /// and each publication costs both sides a transfer of a cache line.
    #[inline]
    pub(crate) fn entries_to_publish(&self) -> u16 {
        (self.most.max(self.before) / 8).clamp(1, 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publication_follows_depth_of_client() {
        for (outstanding, together) in [(0, 1), (1, 1), (15, 1), (32, 4), (128, 16), (1024, 16)] {
            let mut depth = ClientDepth::default();
            depth.see(outstanding);
            assert_eq!(depth.entries_to_publish(), together, "{outstanding}");
        }
    }

    #[test]
    fn depth_of_client_is_forgotten() {
        let mut depth = ClientDepth::default();
        depth.see(128);
        for _ in 0..FETCHES {
            depth.see(1);
            assert_eq!(depth.entries_to_publish(), 16);
        }
        (0..FETCHES).for_each(|_| depth.see(1));
        assert_eq!(depth.entries_to_publish(), 1);
    }
}
