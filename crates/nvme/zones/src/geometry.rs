//! Geometry of a namespace's zones: sizes, limits and Zone Random Write Areas.

/// Maximum number of zones of a namespace; their table then has 8 MiB.
pub const MAX_ZONES: u32 = 1 << 20;

/// Number and size of zones, and the limits of their use. It does not change while the namespace
/// exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Number of zones of the namespace, up to [`MAX_ZONES`].
    pub zones: u32,
    /// Blocks from the first block of a zone to that of the next; a power of two, up to 2^40.
    pub size: u64,
    /// Number of writable blocks of each zone, up to `size`.
    pub capacity: u64,
    /// Maximum number of open zones at a time; `None` for no limit.
    pub max_open: Option<u32>,
    /// Maximum number of zones active (open or closed) at one time; `None`: all.
    pub max_active: Option<u32>,
    /// Parameters of Zone Random Write Areas; `None` if zones have none.
    pub zrwa: Option<Zrwa>,
}

/// Parameters of Zone Random Write Areas. The `size` blocks from the write pointer on can be
/// written in any order, and rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zrwa {
    /// Size in blocks of a zone's random write area, a multiple of `granularity` (ZRWASZ).
    pub size: u16,
    /// Flush granularity in blocks: the write pointer moves by multiples of it (ZRWAFG).
    pub granularity: u16,
    /// Maximum number of zones with an area at one time; `None`: the limit of active zones.
    pub resources: Option<u32>,
}

/// Reason why a zone geometry is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The number of zones is 0 or too large.
    #[error("{0} zones: 1 to {MAX_ZONES} are allowed")]
    Zones(u32),
    /// The zone size is not a power of two, or too large. Hosts support only powers of two.
    #[error("zones of {0} blocks: a power of two up to 2^40 is allowed")]
    Size(u64),
    /// The zone capacity is 0, or exceeds the zone size.
    #[error("{capacity} blocks of a zone can be written: 1 to its size, {size}, are allowed")]
    Capacity {
        /// Zone capacity in blocks.
        capacity: u64,
        /// Zone size in blocks.
        size: u64,
    },
    /// A limit of zones is 0, or the limit of open zones exceeds that of active zones.
    #[error(
        "the limits of open and active zones: 1 at least, and no more open ones than active ones"
    )]
    Limits,
    /// The size of Zone Random Write Areas is invalid.
    #[error(
        "a random write area of {size} blocks, flushed by {granularity}: a multiple of that, which \
         the zone's capacity, {capacity} blocks, is too, and no more than that capacity is allowed"
    )]
    Zrwa {
        /// Size of a Zone Random Write Area in blocks.
        size: u16,
        /// Flush granularity of the area in blocks.
        granularity: u16,
        /// Zone capacity in blocks.
        capacity: u64,
    },
    /// The limit of Zone Random Write Areas is 0, or exceeds that of active zones.
    #[error("the number of random write areas: 1 at least, and no more than active zones")]
    ZrwaResources,
}

impl Geometry {
    /// Checks sizes and limits for consistency.
    ///
    /// # Errors
    /// [`GeometryError`] names the first invalid value.
    pub fn check(&self) -> Result<(), GeometryError> {
        if !(1..=MAX_ZONES).contains(&self.zones) {
            return Err(GeometryError::Zones(self.zones));
        }
        if !self.size.is_power_of_two() || self.size > 1 << 40 {
            return Err(GeometryError::Size(self.size));
        }
        if !(1..=self.size).contains(&self.capacity) {
            let (capacity, size) = (self.capacity, self.size);
            return Err(GeometryError::Capacity { capacity, size });
        }
        let none = self.max_open == Some(0) || self.max_active == Some(0);
        let more = matches!((self.max_open, self.max_active), (Some(o), Some(a)) if o > a)
            || (self.max_open.is_none() && self.max_active.is_some_and(|a| a < self.zones));
        if none || more {
            return Err(GeometryError::Limits);
        }
        self.zrwa.map_or(Ok(()), |zrwa| self.check_zrwa(zrwa))
    }

    fn check_zrwa(&self, zrwa: Zrwa) -> Result<(), GeometryError> {
        let (size, granularity) = (u64::from(zrwa.size), u64::from(zrwa.granularity));
        // Otherwise the last blocks of a zone could never be flushed.
        let whole = granularity > 0
            && size.is_multiple_of(granularity)
            && self.capacity.is_multiple_of(granularity);
        if !whole || !(1..=self.capacity).contains(&size) {
            return Err(GeometryError::Zrwa {
                size: zrwa.size,
                granularity: zrwa.granularity,
                capacity: self.capacity,
            });
        }
        let more = matches!((zrwa.resources, self.max_active), (Some(r), Some(a)) if r > a);
        if zrwa.resources == Some(0) || more {
            Err(GeometryError::ZrwaResources)
        } else {
            Ok(())
        }
    }

    /// Returns the maximum number of zones with a Zone Random Write Area at one time; `None` if
    /// none may have one.
    pub fn zrwa_resources(&self) -> Option<u32> {
        let zrwa = self.zrwa?;
        let limit = zrwa.resources.or(self.max_active);
        Some(limit.map_or(self.zones, |limit| limit.min(self.zones)))
    }

    /// Returns the number of blocks of the namespace.
    pub fn blocks(&self) -> u64 {
        // 2^60 at most.
        u64::from(self.zones) * self.size
    }

    /// Returns the number of the zone that contains a block; `None` if the block does not exist.
    pub fn zone_of(&self, lba: u64) -> Option<u32> {
        let zone = lba >> self.size.trailing_zeros();
        u32::try_from(zone).ok().filter(|zone| *zone < self.zones)
    }

    /// Returns the LBA of a zone's first block.
    pub fn start_of(&self, zone: u32) -> u64 {
        u64::from(zone) * self.size
    }
}
