//! Measured distance between two CPUs. The host of a virtual machine may move its CPUs within
//! seconds, from cores that share a cache to distant ones.
//!
//! The round trips of a cache line during a suite fall into groups. Each group is a distance, and
//! figures of different distances are not mixed.

use crate::results::median;
use serde::{Deserialize, Serialize};

/// Maximum factor between two round trips of the same distance.
const SAME: f64 = 1.15;
/// Minimum share of round trips for a distance. Smaller groups were only passed through while a CPU
/// was moved.
const PASSING: f64 = 0.05;

/// A distance between the two CPUs that a suite uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Distance {
    /// Median round trip of a cache line in nanoseconds.
    pub round_trip: f64,
    /// Minimum round trip in nanoseconds; `to` is the maximum.
    pub from: f64,
    pub to: f64,
    /// Share of the time, from 0 to 1, during which the CPUs had this distance.
    pub share: f64,
}

impl Distance {
    /// Returns whether a round trip belongs to this distance.
    pub fn holds(&self, round_trip: f64) -> bool {
        (self.from..=self.to).contains(&round_trip)
    }
}

/// Returns whether two round trips, in nanoseconds, belong to one distance.
pub fn agree(one: f64, other: f64) -> bool {
    one.max(other) <= one.min(other) * SAME
}

/// Groups round trips into distances, nearest first.
pub fn found(round_trips: &[f64]) -> Vec<Distance> {
    let mut sorted: Vec<f64> = round_trips.iter().copied().filter(|r| *r > 0.0).collect();
    sorted.sort_by(f64::total_cmp);
    // A gap between neighbours is where one distance ends and the next begins.
    let groups = sorted.chunk_by(|one, next| agree(*one, *next));
    let distances = groups.map(|group| Distance {
        round_trip: median(group).round(),
        from: group.first().copied().unwrap_or_default(),
        to: group.last().copied().unwrap_or_default(),
        share: group.len() as f64 / sorted.len() as f64,
    });
    distances.filter(|d| d.share >= PASSING).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_are_grouped_into_distances() {
        let near = [112.0, 115.0, 118.0, 121.0, 130.0];
        let far = [290.0, 300.0, 310.0, 330.0];
        let mut all = [&near[..], &far].concat();
        all.rotate_left(3);
        let distances = found(&all);
        let trips: Vec<f64> = distances.iter().map(|d| d.round_trip).collect();
        assert_eq!(trips, [118.0, 305.0]);
        let [first, second] = distances.as_slice() else {
            panic!("{distances:?}");
        };
        assert!((first.share - 5.0 / 9.0).abs() < 1e-9, "{distances:?}");
        assert!(near.iter().all(|&r| first.holds(r) && !second.holds(r)));
        assert!(far.iter().all(|&r| second.holds(r) && !first.holds(r)));
    }

    #[test]
    fn single_outlier_is_no_distance() {
        let mut trips = vec![100.0; 39];
        trips.push(500.0);
        assert_eq!(found(&trips).len(), 1);
        trips.extend([500.0; 3]);
        assert_eq!(found(&trips).len(), 2);
        assert!(found(&[]).is_empty() && found(&[0.0]).is_empty());
    }

    #[test]
    fn round_trip_agreement_is_symmetric() {
        assert!(agree(100.0, 114.0) && agree(114.0, 100.0));
        assert!(!agree(100.0, 116.0) && !agree(116.0, 100.0));
    }
}
