//! Metrics of several processes in one exposition.

use crate::catalog::INSTANCE_UP;
use crate::text::{Exposition, escape};
use std::collections::HashMap;

/// Expositions of several processes in one text. Each sample gets a label `instance`. All samples
/// of a metric are together, as the format demands. The texts are merged as text, so that metrics
/// of another version of the program are included.
#[derive(Debug, Default)]
pub struct MergedExposition {
    /// Instances, and whether each has answered.
    instances: Vec<(String, bool)>,
    families: Vec<FamilyText>,
    /// Index of each family in `families`, by the name of the metric.
    index: HashMap<String, usize>,
}

/// Lines of a metric: its description, and the samples of all instances.
#[derive(Debug, Default)]
struct FamilyText {
    head: String,
    samples: String,
}

impl MergedExposition {
    /// Adds the exposition of an instance; `None` if the instance does not answer.
    pub fn add(&mut self, instance: &str, exposition: Option<&str>) {
        self.instances
            .push((instance.to_owned(), exposition.is_some()));
        let mut label = String::from("instance=\"");
        escape(&mut label, instance, true);
        label.push('"');
        let mut family = None;
        for line in exposition.unwrap_or_default().lines() {
            if let Some(description) = line.strip_prefix("# ") {
                let mut words = description.split(' ').skip(1);
                family = words.next().map(|name| self.family(name));
                let family = family.and_then(|at| self.families.get_mut(at));
                // The description of the first instance counts.
                if let Some(family) = family.filter(|family| family.samples.is_empty()) {
                    family.head.push_str(line);
                    family.head.push('\n');
                }
            } else if let Some(family) = family.and_then(|at| self.families.get_mut(at)) {
                push_labelled(&mut family.samples, line, &label);
            }
        }
    }

    /// Returns the index of the family with this name, which is added if there is none.
    fn family(&mut self, name: &str) -> usize {
        if let Some(index) = self.index.get(name) {
            return *index;
        }
        let index = self.families.len();
        self.families.push(FamilyText::default());
        self.index.insert(name.to_owned(), index);
        index
    }

    /// Returns the complete text.
    pub fn finish(self) -> String {
        let mut up = Exposition::default();
        let mut family = up.family(&INSTANCE_UP);
        for (instance, is_up) in &self.instances {
            family.sample(&[("instance", instance)], u8::from(*is_up));
        }
        let mut text = up.finish();
        for family in self.families {
            text.push_str(&family.head);
            text.push_str(&family.samples);
        }
        text
    }
}

/// Appends a sample with a further label, in front of its other labels.
fn push_labelled(samples: &mut String, line: &str, label: &str) {
    let name_end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(name_end);
    samples.push_str(name);
    samples.push('{');
    samples.push_str(label);
    match rest.strip_prefix('{') {
        Some(rest) => {
            samples.push(',');
            samples.push_str(rest);
        }
        None => {
            samples.push('}');
            samples.push_str(rest);
        }
    }
    samples.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_samples_are_labelled_and_grouped_by_metric() {
        let first = "# HELP a_total First.\n# TYPE a_total counter\n\
                     a_total{disk=\"vm0\"} 7\na_total{disk=\"b} 1\"} 8\n\
                     # HELP c Third.\n# TYPE c gauge\nc 1.5\n";
        let second = "# HELP c Other.\n# TYPE c gauge\nc 2\n\
                      # HELP a_total First.\n# TYPE a_total counter\na_total{disk=\"vm0\"} 9\n";
        let mut merged = MergedExposition::default();
        merged.add("vnvme@x", Some(first));
        merged.add("gone", None);
        merged.add("with\"quote", Some(second));
        let text = merged.finish();
        let (up, rest) = text.split_once("# HELP a_total").unwrap_or_default();
        assert!(up.starts_with("# HELP vnvme_instance_up "), "{up}");
        assert!(
            up.ends_with(
                "# TYPE vnvme_instance_up gauge\n\
                 vnvme_instance_up{instance=\"vnvme@x\"} 1\n\
                 vnvme_instance_up{instance=\"gone\"} 0\n\
                 vnvme_instance_up{instance=\"with\\\"quote\"} 1\n"
            ),
            "{up}"
        );
        assert_eq!(
            rest,
            " First.\n# TYPE a_total counter\n\
             a_total{instance=\"vnvme@x\",disk=\"vm0\"} 7\n\
             a_total{instance=\"vnvme@x\",disk=\"b} 1\"} 8\n\
             a_total{instance=\"with\\\"quote\",disk=\"vm0\"} 9\n\
             # HELP c Third.\n# TYPE c gauge\n\
             c{instance=\"vnvme@x\"} 1.5\nc{instance=\"with\\\"quote\"} 2\n"
        );
    }
}
