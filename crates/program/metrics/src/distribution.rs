//! Snapshot of a histogram.

use probes::Histogram;
use serde::{Deserialize, Serialize};

/// Distribution of values over contiguous steps, each at most a sixteenth as wide as its values.
/// Snapshots of the same histogram can be subtracted, and several can be added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    /// Nonempty steps: the largest value of each, and the number of values in it.
    pub steps: Vec<(u64, u64)>,
    /// Sum of the values.
    pub sum: u64,
}

/// Multiplies a value by a factor, saturating at the largest value.
fn scaled(value: u64, factor: f64) -> u64 {
    // From float to integer, `as` saturates.
    (value as f64 * factor).round() as u64
}

impl Distribution {
    /// Converts a histogram, multiplying each value by `factor`, for example nanoseconds per cycle.
    pub fn of(histogram: &Histogram, factor: f64) -> Self {
        let mut all = Self::default();
        for (upper, count) in histogram.counts() {
            let upper = scaled(upper, factor);
            match all.steps.last_mut() {
                // A small factor makes one step of several.
                Some((last, sum)) if *last == upper => *sum = sum.wrapping_add(count),
                _ => all.steps.push((upper, count)),
            }
        }
        all.sum = scaled(histogram.total(), factor);
        all
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        let counts = self.steps.iter().map(|(_, count)| *count);
        counts.fold(0, u64::wrapping_add)
    }

    /// Returns whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Returns the average of the values; `None` when there are none.
    pub fn average(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// Returns the percentile at `part`, from 0 to 1, at most a sixteenth too large; `None` when
    /// there are no values.
    pub fn percentile(&self, part: f64) -> Option<u64> {
        let rank = (self.count() as f64 * part).ceil().max(1.0);
        let mut seen = 0.0;
        let found = self.steps.iter().find(|(_, count)| {
            seen += *count as f64;
            seen >= rank
        });
        found.or(self.steps.last()).map(|(upper, _)| *upper)
    }

    /// Adds the values of another distribution.
    pub fn add(&mut self, other: &Self) {
        for (upper, count) in &other.steps {
            match self.steps.binary_search_by_key(upper, |(upper, _)| *upper) {
                Ok(at) => {
                    if let Some((_, sum)) = self.steps.get_mut(at) {
                        *sum = sum.wrapping_add(*count);
                    }
                }
                Err(at) => self.steps.insert(at, (*upper, *count)),
            }
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// Returns the values added since an earlier snapshot. If the earlier one has more values, it
    /// belongs to another process, and all values are returned.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |upper: u64| {
            let found = earlier.steps.binary_search_by_key(&upper, |(u, _)| *u);
            let step = found.ok().and_then(|at| earlier.steps.get(at));
            step.map_or(0, |(_, count)| *count)
        };
        if self.steps.iter().any(|(u, n)| before(*u) > *n) || earlier.count() > self.count() {
            return self.clone();
        }
        let left = self.steps.iter().map(|(u, n)| (*u, n - before(*u)));
        Self {
            steps: left.filter(|(_, count)| *count > 0).collect(),
            sum: self.sum.saturating_sub(earlier.sum),
        }
    }

    /// Returns the number of values up to each of these ascending bounds.
    pub fn cumulative(&self, bounds: &[u64]) -> Vec<u64> {
        let mut steps = self.steps.iter().peekable();
        let mut sum = 0u64;
        let mut counts = Vec::with_capacity(bounds.len());
        for bound in bounds {
            while let Some((_, count)) = steps.next_if(|(upper, _)| upper <= bound) {
                sum = sum.wrapping_add(*count);
            }
            counts.push(sum);
        }
        counts
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by a panic.
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(values: &[u64], factor: f64) -> Distribution {
        let histogram = Histogram::new();
        values.iter().for_each(|v| histogram.record(*v));
        Distribution::of(&histogram, factor)
    }

    #[test]
    fn empty_distribution_has_no_percentile() {
        let none = Distribution::default();
        assert_eq!((none.count(), none.percentile(0.99)), (0, None));
        assert_eq!(none.average(), None);
        assert_eq!(none.cumulative(&[1, 2]), [0, 0]);
    }

    #[test]
    fn larger_earlier_distribution_belongs_to_other_process() {
        let (old, new) = (of(&[5, 5, 9], 1.0), of(&[5], 1.0));
        assert_eq!(new.since(&old), new);
        let other = of(&[7, 7, 7, 7], 1.0);
        assert_eq!(new.since(&other), new);
    }

    proptest! {
        #[test]
        fn distribution_matches_values(
            mut values in prop::collection::vec(0u64..1 << 36, 1..200),
            factor in 0.05f64..4.0,
            cut in 0usize..200,
        ) {
            let all = of(&values, factor);
            let (early, late) = values.split_at(cut.min(values.len()));
            let (early, late) = (of(early, factor), of(late, factor));
            prop_assert_eq!(all.count(), values.len() as u64);
            prop_assert_eq!(&all.since(&early).steps, &late.steps);
            let mut sum = early.clone();
            sum.add(&late);
            prop_assert_eq!(&sum.steps, &all.steps);
            values.sort_unstable();
            for part in [0.0, 0.5, 0.9, 0.99, 1.0] {
                let rank = (values.len() as f64 * part).ceil().max(1.0) as usize;
                let value = values[rank - 1] as f64 * factor;
                let found = all.percentile(part).unwrap() as f64;
                prop_assert!(found >= value.floor() - 1.0 && found <= value * 17.0 / 16.0 + 2.0,
                    "{part}: {found} of {value}");
            }
            let bounds = [10, 1000, 1_000_000, u64::MAX];
            let counts = all.cumulative(&bounds);
            prop_assert!(counts.is_sorted());
            prop_assert_eq!(counts[3], values.len() as u64);
        }
    }
}
