-- uses: readers
-- A reader begins, having read up to `cursor`: the answer is where it goes on. That is later where
-- nothing that it reads for lies between.
local row = read_reader(args.name) or {cursor = '0-0', done = '0-0', joined_ms = NOW}
local from = args.cursor
if not is_before(from, row.done) and is_before(from, row.cursor) and not row.has_left then
  from = row.cursor
end
row.cursor, row.done, row.location, row.last_seen_ms, row.has_left = from, from, args.location,
  NOW, nil
write_reader(args.name, row)
return cjson.encode({from = from})
