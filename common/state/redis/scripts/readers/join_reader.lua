-- uses: readers
-- Registers a reader that has read up to `cursor`. Answers the id to continue from, which is later
-- if only irrelevant events lie between.
local row = read_reader(args.name) or {cursor = '0-0', done = '0-0', joined_ms = NOW}
local start = args.cursor
if not is_before(start, row.done) and is_before(start, row.cursor) and not row.has_left then
  start = row.cursor
end
row.cursor, row.done, row.location, row.last_seen_ms, row.has_left = start, start, args.location,
  NOW, nil
write_reader(args.name, row)
return cjson.encode({from = start})
